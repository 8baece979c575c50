#include "model/layer_products.h"

namespace penstock {
namespace {

// Up to this many rows, every thread writes all input rows for itself, which costs less than a barrier.
constexpr int kRowsToRepeat = 2;

}  // namespace

void LayerProducts::prepare(Slot slot, const Matrix& matrix) {
  const int rows = (int)tokens_.size();
  for (Inputs& own : inputs_) {
    own[input_of(slot)][(int)matrix.format].prepare(rows, matrix.columns, matrix.format);
    if (rows > kRowsToRepeat) return;
  }
}

// Whether every thread writes all rows for itself. Not with adapters: all threads read the shrunk rows, but only one
// may write each of them.
bool LayerProducts::repeats() const { return (int)tokens_.size() <= kRowsToRepeat && !step_.plan.adapters; }

}  // namespace penstock
