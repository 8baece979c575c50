#include "model/adapters.h"

#include <algorithm>

namespace penstock {

void Adapters::set(int adapter_slot, int layer, Slot matrix, LowRank low_rank) {
  while ((int)slots_.size() <= adapter_slot) slots_.emplace_back(num_layers_);
  largest_rank_ = std::max(largest_rank_, low_rank.rank());
  slots_[adapter_slot][layer][(int)matrix] = std::move(low_rank);
}

void Adapters::reserve(int rows) { inner_.reserve((size_t)rows * largest_rank_); }

const LowRank* Adapters::find(const Step& step, int token, int layer, Slot matrix) const {
  const int adapter_slot = step.plan.adapters ? step.plan.adapters[step.seq_of_token[token]] : -1;
  if (adapter_slot < 0) return nullptr;
  const LowRank& found = slots_[adapter_slot][layer][(int)matrix];
  return found.rank() ? &found : nullptr;
}

void Adapters::shrink(const Step& step, int row, int token, int layer, Slot matrix, const float* x) const {
  if (const LowRank* low_rank = find(step, token, layer, matrix)) low_rank->shrink(x, inner_row(row));
}

void Adapters::expand(const Step& step, int first, int count, const std::vector<int>& tokens, int layer, Slot matrix,
                      int panel, float* out) const {
  if (!step.plan.adapters) return;
  for (int r = 0; r < count; ++r) {
    const LowRank* low_rank = find(step, tokens[first + r], layer, matrix);
    if (low_rank) low_rank->expand(inner_row(first + r), panel, out + r * kPanel);
  }
}

}  // namespace penstock
