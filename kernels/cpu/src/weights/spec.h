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
  // Norms of the hidden state before attention and MLP, and norms of their outputs.
  int32_t has_input_norms, has_output_norms;
  int32_t joins_head_norms;  // whether a norm of queries or keys spans all heads of a token, not one head.
  int32_t num_ropes;         // tables of RoPE angles; each layer has one of them or none.
  int32_t num_experts, experts_per_token;  // 0: one MLP in each layer. `intermediate` is that of an expert.
  int32_t normalizes_experts;              // whether the weights of a token's experts are divided by their sum.
  float embedding_scale, residual_scale;   // factors of embeddings, and of what is added to the hidden state.
  float score_scale;                       // factor of attention scores; 0: 1 / sqrt(head_dim).
  float score_cap;                         // a score s becomes cap * tanh(s / cap); 0: it stays.
  float logit_scale, logit_cap;            // Likewise.
  int32_t rank, num_ranks;                 // of the group that computes the model together; 0 or 1 ranks: no group.

  int queries() const { return num_heads * head_dim; }
  int group() const { return num_heads / num_kv_heads; }
  // The panels of the MLP's first matrix, or of an expert's.
  int inner_panels() const { return ((is_gated ? 2 : 1) * intermediate + 31) / 32; }
  int group_size() const { return num_ranks > 1 ? num_ranks : 1; }
};

}  // namespace penstock
