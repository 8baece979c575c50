// Packs rows of a checkpoint into a matrix.
#pragma once
#include "threads/team.h"
#include "gemm/hadamard.h"
#include "weights/weights.h"

namespace penstock {

// `count` rows of `row_bytes` each, which become the rows of a matrix from `first` on. `order`: the source row of
// each, or null.
struct Part {
  Source source;
  RowLayout layout;
  int first, count;
  const uint8_t* data;
  size_t row_bytes;
  const int32_t* order;

  const uint8_t* row(int i) const { return data + (order ? order[i] : i) * row_bytes; }
};

// How a part is transformed before it is packed; a null worker does nothing. Columns are multiplied by `gains` and
// rotated by `columns`. Then `outputs` rotates the outputs, so its size is their number.
struct WeightTransform {
  const float* gains;
  const HadamardRotation* columns;
  const HadamardRotation* outputs;

  bool is_none() const { return !gains && !columns && !outputs; }
};

// Packs a part, on all threads.
void fill(Team& team, Matrix& matrix, const Part& part, const WeightTransform& transform);

}  // namespace penstock
