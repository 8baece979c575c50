// LoRA adapters: which sequence of a step uses which, and what they add to the products of a layer's matrices.
#pragma once
#include <array>
#include <vector>

#include "gemm/low_rank.h"
#include "model/decoder_weights.h"
#include "model/step.h"

namespace penstock {

class Adapters {
 public:
  explicit Adapters(int num_layers) : num_layers_(num_layers) {}

  // Sets what the adapter in a slot adds to a layer's matrix. Its rank is 0 if it adds nothing.
  void set(int adapter_slot, int layer, Slot matrix, LowRank low_rank);
  // Reserves memory for the products of `rows` rows.
  void reserve(int rows);

  // Reduces the input `x` of one row of a product; the row belongs to `token`.
  void shrink(const Step& step, int row, int token, int layer, Slot matrix, const float* x) const;
  // Adds the adapters' part to a panel of `count` rows, whose first is `first`. tokens: the token of each row; out:
  // [count][kPanel].
  void expand(const Step& step, int first, int count, const std::vector<int>& tokens, int layer, Slot matrix, int panel,
              float* out) const;

 private:
  // What an adapter adds to the matrices of one layer.
  using AdaptedLayer = std::array<LowRank, kLayerSlots>;

  const LowRank* find(const Step& step, int token, int layer, Slot matrix) const;
  float* inner_row(int row) const { return inner_.data() + (size_t)row * largest_rank_; }

  int num_layers_;
  int largest_rank_ = 0;                          // of any adapter's matrix so far
  std::vector<std::vector<AdaptedLayer>> slots_;  // [adapter slots][layers]
  Buffer<float> inner_;                           // low-rank values of the current product, [rows][largest_rank]
};

}  // namespace penstock
