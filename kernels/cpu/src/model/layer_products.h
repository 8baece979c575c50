// The products of a step's rows with a layer's matrices, LoRA adapters included.
#pragma once
#include <array>
#include <vector>

#include "gemm/gemm.h"
#include "weights/adapters.h"
#include "weights/decoder_weights.h"
#include "model/step.h"
#include "model/step_buffers.h"

namespace penstock {

class LayerProducts {
 public:
  // `tokens`: the token of each row, which may change between steps.
  LayerProducts(const std::vector<int>& tokens, const Step& step, const Adapters& adapters, int num_threads)
      : tokens_(tokens), step_(step), adapters_(adapters), inputs_(num_threads) {}

  const std::vector<int>& tokens() const { return tokens_; }

  // Reserves memory for the rows' product with a layer's matrix.
  void prepare(const Layer& layer, Slot slot);

  // Multiplies each row with a layer's matrix. `read(row)` returns the row's input. Panels of outputs go to
  // `finish(first_row, num_rows, panel, out)`, as for `multiply`.
  template <class Read, class Finish>
  void run(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Finish& finish);

  // Adds each row's product with a layer's matrix to the row's token in `sums`.
  template <class Read>
  void add(Worker& worker, const Layer& layer, Slot slot, const Read& read, const RowBuffer& sums);

 private:
  // Inputs of a layer's matrices: the normed hidden state, the output of the attention, the gated product.
  enum Input { kNormed = 0, kAttended = 1, kGated = 2 };
  static constexpr int kNumInputs = 3;
  using Inputs = std::array<std::array<Activations, kNumEncodings>, kNumInputs>;

  static Input input_of(Slot slot) {
    if (slot == Slot::kOut) return kAttended;
    return slot == Slot::kMlpOut ? kGated : kNormed;
  }
  bool repeats() const;
  void add_adapters(int first, int count, const Layer& layer, Slot slot, int panel, float* out) const;
  const LowRank* low_rank(int row, const Layer& layer, Slot slot) const;
  float* inner_row(int row) const { return inner_.data() + (size_t)row * adapters_.largest_rank(); }

  const std::vector<int>& tokens_;
  const Step& step_;
  const Adapters& adapters_;
  std::vector<Inputs> inputs_;  // one per thread; all but the first hold only a few rows
  Buffer<float> inner_;         // low-rank values of the current product, [rows][largest rank]
};

template <class Read, class Finish>
void LayerProducts::run(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Finish& finish) {
  const Matrix& matrix = layer.matrix(slot);
  Activations& left = inputs_[repeats() ? worker.index() : 0][input_of(slot)][(int)matrix.encoding()];
  const auto set_row = [&](int i) {
    const float* x = read(i);
    left.set_row(i, x);
    if (const LowRank* adapter = low_rank(i, layer, slot)) adapter->shrink(x, inner_row(i));
  };
  const int num_rows = (int)tokens_.size();
  if (repeats()) {
    for (int i = 0; i < num_rows; ++i) set_row(i);
  } else {
    worker.for_each(num_rows, set_row);
  }
  multiply(worker, left, matrix, [&](int first, int count, int panel, float* out) {
    if (step_.plan.adapters) add_adapters(first, count, layer, slot, panel, out);
    finish(first, count, panel, out);
  });
}

template <class Read>
void LayerProducts::add(Worker& worker, const Layer& layer, Slot slot, const Read& read, const RowBuffer& sums) {
  run(worker, layer, slot, read, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      float* sum = sums.row(tokens_[first + r]) + panel * kPanel;
      for (int j = 0; j < kPanel; j += kLanes) store(sum + j, load(sum + j) + load(out + r * kPanel + j));
    }
  });
}

}  // namespace penstock
