// Source rows on their way into a matrix.
#pragma once
#include "threads/team.h"
#include "gemm/hadamard.h"
#include "model/weights.h"

namespace penstock {

// `count` rows of `row_bytes` each that become the rows of a matrix from `first` on; `order` may be null.
struct Part {
  Source source;
  Place place;
  int first, count;
  const uint8_t* data;
  size_t row_bytes;
  const int32_t* order;

  const uint8_t* row(int i) const { return data + (order ? order[i] : i) * row_bytes; }
};

// What is done to a part before it is packed, null where nothing is: columns are multiplied by `gains` and turned, then
// the outputs are, whose number `outputs` is for.
struct Change {
  const float* gains;
  const Turn* columns;
  const Turn* outputs;

  bool is_none() const { return !gains && !columns && !outputs; }
};

// Packs a part, on all threads.
void fill(Team& team, Matrix& matrix, const Part& part, const Change& change);

}  // namespace penstock
