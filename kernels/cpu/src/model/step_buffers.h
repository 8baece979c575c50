// The rows of numbers that the stages of a step hand to each other.
#pragma once
#include "weights/spec.h"
#include "weights/weights.h"
#include "threads/memory.h"

namespace penstock {

// Rows of float32 numbers, padded to whole panels.
class RowBuffer {
 public:
  explicit RowBuffer(int columns) : stride_(round_up(columns, kPanel)) {}

  // Grows the buffer to at least `count` rows. Growing discards the old contents.
  void reserve(int count) { values_.reserve((size_t)count * stride_); }
  float* row(int i) const { return values_.data() + (size_t)i * stride_; }
  // Numbers of a row, padding included.
  int stride() const { return stride_; }

 private:
  int stride_;
  Buffer<float> values_;
};

// sum += scale * values.
inline void add_scaled(const float* values, float scale, int count, float* sum) {
  for (int i = 0; i < count; i += kLanes) store(sum + i, fma(load(values + i), broadcast(scale), load(sum + i)));
}

struct StepBuffers {
  RowBuffer hidden;    // by token: the residual stream
  RowBuffer qkv;       // by token: queries, keys, values
  RowBuffer attended;  // by token: the output of the attention
  RowBuffer gated;     // by row of a layer's products: the input of the MLP's second matrix.
  RowBuffer outputs;   // by row of a layer's products: outputs that are normed before they are added.

  explicit StepBuffers(const Spec& spec)
      : hidden(spec.hidden),
        qkv(spec.queries() + 2 * spec.num_kv_heads * spec.head_dim),
        attended(spec.queries()),
        gated(spec.intermediate),
        outputs(spec.hidden) {}

  void reserve(int num_tokens) {
    for (RowBuffer* rows : {&hidden, &qkv, &attended, &gated, &outputs}) rows->reserve(num_tokens);
  }
};

}  // namespace penstock
