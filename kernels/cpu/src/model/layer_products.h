// The products of a step's rows with a layer's matrices, LoRA adapters included.
#pragma once
#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "gemm/gemm.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "ranks/group.h"
#include "ranks/share.h"
#include "weights/adapters.h"
#include "weights/decoder_weights.h"

namespace penstock {

class LayerProducts {
 public:
  // `tokens`: the token of each row, which may change between steps.
  LayerProducts(const std::vector<int>& tokens, const Spec& spec, const Share& share, RankGroup& group,
                const Step& step, const Adapters& adapters, const StepBuffers& buffers, int num_threads)
      : tokens_(tokens),
        spec_(spec),
        share_(share),
        group_(group),
        step_(step),
        adapters_(adapters),
        buffers_(buffers),
        inputs_(num_threads) {}

  const std::vector<int>& tokens() const { return tokens_; }

  // Reserves memory for the rows' product with a layer's matrix.
  void prepare(const Layer& layer, Slot slot);

  // Multiplies each row with this rank's panels of a layer's matrix. `read(row)` returns the row's input. Panels of outputs go to
  // `finish(first_row, num_rows, panel, out)`, as for `multiply`.
  template <class Read, class Finish>
  void run(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Finish& finish);

  // Whether `run` calls `read` once for each row.
  bool reads_once() const { return !repeats() && group_.is_alone(); }

  // Whether inputs of a layer's matrix can be written by columns, with `set_input`, before `kInputsAreSet` is read.
  bool takes_columns(const Layer& layer, Slot slot) const {
    return reads_once() && !step_.plan.adapters && layer.matrix(slot).encoding() != Encoding::kByRow;
  }
  // Writes columns [32 * group, 32 * group + 32) of `count` rows' inputs. values: [count][32].
  void set_input(const Layer& layer, Slot slot, int first, int count, int group, const float* values) {
    rows_for(inputs_[0], slot, layer.matrix(slot)).set_group(first, count, group, values);
  }
  // Stands for `read` if `set_input` has written all inputs.
  static constexpr struct InputsAreSet {
  } kInputsAreSet{};

  // Adds each row's product with a layer's matrix to the hidden state of the row's token, as far as this rank computes
  // that. `norm` norms the products if it is present; the sum is then multiplied by `factor`.
  template <class Read>
  void add(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Norm& norm, float factor = 1.f);
  // As `add`, for a norm that is present. `settle(row, products)` changes the products of a row before they are normed.
  template <class Read, class Settle>
  void add_normed(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Norm& norm, float factor,
                  const Settle& settle);

 private:
  // Inputs of a layer's matrices: the normed hidden state, the output of the attention, the gated product.
  enum Input { kNormed = 0, kAttended = 1, kGated = 2 };
  static constexpr int kNumInputs = 3;
  // An input as the matrices of one width read it. Layers may have other widths.
  struct Encoded {
    int columns;
    Activations rows;
  };
  using Inputs = std::array<std::array<std::vector<Encoded>, kNumEncodings>, kNumInputs>;

  static Input input_of(Slot slot) {
    if (slot == Slot::kOut || slot == Slot::kMixerOut) return kAttended;
    return slot == Slot::kMlpOut || slot == Slot::kTokenOut ? kGated : kNormed;
  }
  // Returns the rows that a matrix reads. They are added if they are not there yet, which only `prepare` may do.
  static Activations& rows_for(Inputs& inputs, Slot slot, const Matrix& matrix);
  bool repeats() const;
  void add_adapters(int first, int count, const Layer& layer, Slot slot, int panel, float* out) const;
  const LowRank* low_rank(int row, const Layer& layer, Slot slot) const;
  float* inner_row(int row) const { return inner_.data() + (size_t)row * adapters_.largest_rank(); }

  const std::vector<int>& tokens_;
  const Spec& spec_;
  const Share& share_;
  RankGroup& group_;
  const Step& step_;
  const Adapters& adapters_;
  const StepBuffers& buffers_;
  std::vector<Inputs> inputs_;  // one per thread; all but the first hold only a few rows
  Buffer<float> inner_;         // low-rank values of the current product, [rows][largest rank]
};

template <class Read, class Finish>
void LayerProducts::run(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Finish& finish) {
  const Matrix& matrix = layer.matrix(slot);
  Activations& left = rows_for(inputs_[repeats() ? worker.index() : 0], slot, matrix);
  if constexpr (!std::is_same_v<Read, InputsAreSet>) {
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
  }
  multiply(worker, left, matrix, share_.panels(layer.index, slot), [&](int first, int count, int panel, float* out) {
    if (step_.plan.adapters) add_adapters(first, count, layer, slot, panel, out);
    finish(first, count, panel, out);
  });
}

template <class Read>
void LayerProducts::add(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Norm& norm,
                        float factor) {
  if (norm.is_present()) return add_normed(worker, layer, slot, read, norm, factor, [](int, float*) {});
  const float scale = spec_.residual_scale;
  run(worker, layer, slot, read, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      add_scaled(out + r * kPanel, scale, kPanel, buffers_.hidden.row(tokens_[first + r]) + panel * kPanel);
    }
  });
}

template <class Read, class Settle>
void LayerProducts::add_normed(Worker& worker, const Layer& layer, Slot slot, const Read& read, const Norm& norm,
                               float factor, const Settle& settle) {
  const float scale = spec_.residual_scale;
  run(worker, layer, slot, read, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      copy_panel(out + r * kPanel, buffers_.outputs.row(first + r) + panel * kPanel);
    }
  });
  group_.meet(worker);
  const Span own = share_.hidden();
  worker.for_each((int)tokens_.size(), [&](int i) {
    settle(i, buffers_.outputs.row(i));
    const float* normed = norm.apply(buffers_.outputs.row(i)).values;
    float* sum = buffers_.hidden.row(tokens_[i]) + own.begin;
    add_scaled(normed + own.begin, scale, own.count(), sum);
    if (factor == 1) return;
    for (int c = 0; c < own.count(); c += kLanes) store(sum + c, load(sum + c) * broadcast(factor));
  });
}

}  // namespace penstock
