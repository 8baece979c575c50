// The LoRA adapters that are loaded: what each adds to the products of a layer's matrices.
#pragma once
#include <array>
#include <vector>

#include "gemm/low_rank.h"
#include "weights/decoder_weights.h"

namespace penstock {

class Adapters {
 public:
  explicit Adapters(int num_layers) : num_layers_(num_layers) {}

  // Sets what the adapter in a slot adds to a layer's matrix. With rank 0 it adds nothing.
  void set(int adapter_slot, int layer, Slot matrix, LowRank low_rank);
  // Returns what the adapter in a slot adds to a layer's matrix; null if it adds nothing.
  const LowRank* find(int adapter_slot, int layer, Slot matrix) const;
  // The largest rank of any adapter's matrix so far.
  int largest_rank() const { return largest_rank_; }

 private:
  using AdaptedLayer = std::array<LowRank, kLayerSlots>;

  int num_layers_;
  int largest_rank_ = 0;
  std::vector<std::vector<AdaptedLayer>> slots_;  // [adapter slots][layers]
};

}  // namespace penstock
