// Packs rows of a checkpoint into a matrix.
#pragma once
#include "gemm/hadamard.h"
#include "threads/team.h"
#include "weights/weights.h"

namespace penstock {

// How a part is transformed before it is packed; a null worker does nothing. Columns are multiplied by `gains` and
// rotated by `columns`. Then `outputs` rotates the outputs, so its size is their number.
struct WeightTransform {
  const float* gains;
  const HadamardRotation* columns;
  const HadamardRotation* outputs;

  bool is_none() const { return !gains && !columns && !outputs; }
};

// Packs a part, on all threads. A matrix that is packed on reading only remembers the part; it takes no transform.
void fill(Team& team, Matrix& matrix, const Part& part, const WeightTransform& transform);

}  // namespace penstock
