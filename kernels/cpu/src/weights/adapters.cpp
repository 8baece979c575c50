#include "weights/adapters.h"

#include <algorithm>

namespace penstock {

void Adapters::set(int adapter_slot, int layer, Slot matrix, LowRank low_rank) {
  while ((int)slots_.size() <= adapter_slot) slots_.emplace_back(num_layers_);
  largest_rank_ = std::max(largest_rank_, low_rank.rank());
  slots_[adapter_slot][layer][(int)matrix] = std::move(low_rank);
}

const LowRank* Adapters::find(int adapter_slot, int layer, Slot matrix) const {
  const LowRank& found = slots_[adapter_slot][layer][(int)matrix];
  return found.rank() ? &found : nullptr;
}

}  // namespace penstock
