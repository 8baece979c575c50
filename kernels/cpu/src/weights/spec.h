// The shapes and constants of a decoder, as penstock.gpu_node.model.architecture.spec describes it.
#pragma once
#include <cstdint>

namespace penstock {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

struct Spec {
  int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, max_position;
  float norm_eps;
  int32_t block_size, num_blocks, kv_format;
  // Whether the hidden state and the gated products are Hadamard-rotated (hadamard.h). The norms then have no
  // weights: these are multiplied into the matrices.
  int32_t hadamard_rotation;
  int32_t rotary_dim;  // channels of a head that RoPE rotates; 0: scores have position biases instead
  int32_t activation;
  // Layer norms instead of RMS norms; a gated MLP; an MLP that reads the same input as the attention.
  int32_t has_layer_norms, is_gated, is_parallel;

  int queries() const { return num_heads * head_dim; }
  int group() const { return num_heads / num_kv_heads; }
};

}  // namespace penstock
