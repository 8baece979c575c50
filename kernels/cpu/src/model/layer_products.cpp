#include "model/layer_products.h"

namespace penstock {
namespace {

// Up to this many rows, every thread writes all input rows for itself, which costs less than a barrier.
constexpr int kRowsToRepeat = 2;

}  // namespace

void LayerProducts::prepare(const Layer& layer, Slot slot) {
  const Matrix& matrix = layer.matrix(slot);
  const int rows = (int)tokens_.size();
  if (step_.plan.adapters) inner_.reserve((size_t)rows * adapters_.largest_rank());
  for (Inputs& own : inputs_) {
    rows_for(own, slot, matrix).prepare(rows, matrix);
    if (rows > kRowsToRepeat) return;
  }
}

Activations& LayerProducts::rows_for(Inputs& inputs, Slot slot, const Matrix& matrix) {
  std::vector<Encoded>& known = inputs[input_of(slot)][(int)matrix.encoding()];
  for (Encoded& encoded : known) {
    if (encoded.columns == matrix.padded_columns()) return encoded.rows;
  }
  return known.emplace_back(Encoded{matrix.padded_columns(), {}}).rows;
}

// Whether every thread writes all rows for itself. Not with adapters: all threads read the shrunk rows, but only one
// may write each of them.
bool LayerProducts::repeats() const { return (int)tokens_.size() <= kRowsToRepeat && !step_.plan.adapters; }

// Adds the adapters' part to a panel of the products of `count` rows. out: [count][kPanel].
void LayerProducts::add_adapters(int first, int count, const Layer& layer, Slot slot, int panel, float* out) const {
  for (int r = 0; r < count; ++r) {
    const LowRank* adapter = low_rank(first + r, layer, slot);
    if (adapter) adapter->expand(inner_row(first + r), panel, out + r * kPanel);
  }
}

// What the adapter of a row's sequence adds to a layer's matrix; null if it adds nothing.
const LowRank* LayerProducts::low_rank(int row, const Layer& layer, Slot slot) const {
  const int adapter_slot = step_.adapter_slot(tokens_[row]);
  return adapter_slot < 0 ? nullptr : adapters_.find(adapter_slot, layer.index, slot);
}

}  // namespace penstock
