// The LoRA adapters of a step: which sequence uses which, and what they add to a layer's products.
#include <algorithm>

#include "model/model.h"

namespace penstock {

void Model::set_adapter(int place, int layer, Slot slot, const LowRankPart* parts, int num_parts, const float* gains) {
  while ((int)adapters_.size() <= place) adapters_.emplace_back(spec_.num_layers);
  LowRank& target = adapters_[place][layer][(int)slot];
  target = LowRank(parts, num_parts, matrix(slot, layer), transform_of(slot, gains));
  inner_stride_ = std::max(inner_stride_, target.rank());
}

const LowRank* Model::low_rank(int token, int index, Slot slot) const {
  const int place = plan_.adapters ? plan_.adapters[seq_of_token_[token]] : -1;
  if (place < 0) return nullptr;
  const LowRank& found = adapters_[place][index][(int)slot];
  return found.rank() ? &found : nullptr;
}

// Row `row` of the product belongs to token `token` and has the input `x`.
void Model::shrink(int row, int token, int index, Slot slot, const float* x) {
  if (const LowRank* low = low_rank(token, index, slot)) low->shrink(x, inner_row(row));
}

void Model::expand(int first, int count, const std::vector<int>& rows, int index, Slot slot, int panel,
                   float* out) const {
  if (!plan_.adapters) return;
  for (int r = 0; r < count; ++r) {
    const LowRank* low = low_rank(rows[first + r], index, slot);
    if (low) low->expand(inner_row(first + r), panel, out + r * kPanel);
  }
}

}  // namespace penstock
