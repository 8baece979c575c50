// The rows of numbers that the stages of a step hand to each other.
#pragma once
#include "ranks/group.h"
#include "threads/memory.h"
#include "weights/spec.h"
#include "weights/weights.h"

#include <algorithm>

namespace penstock {

// Rows of float32 numbers, padded to whole panels.
class RowBuffer {
 public:
  explicit RowBuffer(int columns) : stride_(round_up(columns, kPanel)) {}

  // Grows the buffer to at least `count` rows. Growing discards the old contents.
  void reserve(int count) { values_.reserve((size_t)count * stride_); }
  // Uses memory that the ranks share. It holds anything, padding included.
  void place(Arena& arena, int count) {
    Buffer<float> placed = arena.place<float>((size_t)count * stride_);
    if (!arena.only_counts()) values_ = std::move(placed);
  }
  float* row(int i) const { return values_.data() + (size_t)i * stride_; }
  // Numbers of a row, padding included.
  int stride() const { return stride_; }

 private:
  int stride_;
  Buffer<float> values_;
};

// Clears a row's padding.
inline void clear_padding(const RowBuffer& rows, int i, int columns) {
  std::fill(rows.row(i) + columns, rows.row(i) + rows.stride(), 0.f);
}

// sum += scale * values.
inline void add_scaled(const float* values, float scale, int count, float* sum) {
  for (int i = 0; i < count; i += kLanes) store(sum + i, fma(load(values + i), broadcast(scale), load(sum + i)));
}

struct StepBuffers {
  RowBuffer hidden;  // by token: the residual stream
  RowBuffer qkv;     // by token: queries, keys, values, and a recurrent mixer's inputs. A rank has those of its heads.
  RowBuffer joint;   // by token: the same of all ranks. Only for norms over the heads of all ranks.
  RowBuffer attended;  // by token: the output of the attention, and that of a recurrent mixer
  RowBuffer mixed;     // by token: what the convolution before states returns
  RowBuffer gates;     // by token: how far each value head learns, then what is left of its state; gates of heads
  RowBuffer gated;     // by row of a layer's products: the input of the MLP's second matrix.
  RowBuffer outputs;   // by row of a layer's products: outputs that are normed before they are added.

  // layers: [spec.num_layers]. The rows are as wide as the widest layer's.
  StepBuffers(const Spec& spec, const LayerSpec* layers)
      : hidden(spec.hidden),
        qkv(largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.projected(); })),
        joint(qkv.stride()),
        attended(largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.outputs(); })),
        mixed(largest_of_layers(spec, layers,
                                [](const LayerSpec& layer) { return layer.has_states() ? layer.channels : 0; })),
        gates(largest_of_layers(spec, layers,
                                [](const LayerSpec& layer) {
                                  const int heads = layer.has_head_gates ? layer.num_heads : 0;
                                  return std::max(2 * layer.value_heads, heads);
                                })),
        gated(std::max(spec.token_size,
                       largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.intermediate; }))),
        outputs(spec.hidden),
        hidden_(spec.hidden),
        has_outputs_(largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.has_output_norms(); })),
        has_joint_(largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.joins_head_norms; })) {}

  void reserve(int num_tokens) {
    for (RowBuffer* rows : {&hidden, &qkv, &attended, &mixed, &gates, &gated, &outputs}) rows->reserve(num_tokens);
  }

  // As `reserve`, for a rank of a group: it shares the rows that other ranks read.
  void place(Arena& arena, int num_tokens) {
    for (RowBuffer* rows : {&hidden, &attended, &gated}) rows->place(arena, num_tokens);
    if (has_outputs_) outputs.place(arena, num_tokens);
    if (has_joint_) joint.place(arena, num_tokens);
    if (!arena.only_counts()) qkv.reserve(num_tokens);
  }

  // Clears the padding of a token's shared rows, which steps of other sizes have used for other numbers. The stages
  // clear that of `attended` and `gated` in each layer.
  void clear_paddings(int token) const {
    clear_padding(hidden, token, hidden_);
    if (has_outputs_) clear_padding(outputs, token, hidden_);
  }

 private:
  const int hidden_;
  const bool has_outputs_, has_joint_;
};

}  // namespace penstock
