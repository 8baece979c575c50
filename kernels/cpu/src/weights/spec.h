// The shapes and constants of a decoder or an encoder, as penstock.gpu_node.model.architecture.spec describes it.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace penstock {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3 };

struct Spec {
  int32_t num_layers, hidden, vocab, max_position;
  float norm_eps;
  int32_t block_size, num_blocks, kv_format;
  // Whether the hidden state and the gated products are Hadamard-rotated (hadamard.h). The norms then have no
  // weights: these are multiplied into the matrices.
  int32_t hadamard_rotation;
  int32_t has_layer_norms;                    // layer norms instead of RMS norms
  int32_t num_ropes;                          // tables of RoPE angles; each layer has one of them or none.
  float embedding_scale, residual_scale;      // factors of embeddings, and of what is added to the hidden state.
  float logit_scale, logit_cap;               // a logit s becomes cap * tanh(s / cap); 0: it stays.
  int32_t rank, num_ranks;                    // of the group that computes the model together; 0 or 1 ranks: no group.
  int32_t num_state_slots;                    // of the states of recurrent layers
  int32_t token_size;                         // numbers of a token's own embedding for each layer; 0: there are none
  float token_scale, token_projection_scale;  // factors of these embeddings, and of what is added to them
  // Whether each step has whole texts, whose tokens see earlier and later ones. There is no head then, and the cache
  // holds the keys and values of one layer at a time.
  int32_t is_encoder;
  int32_t has_final_norm;      // behind the last layer
  int32_t has_embedding_norm;  // of the sum of a token's embeddings, before the first layer
  int32_t num_query_growths;   // tables of factors of queries by position; each layer has one of them or none.
  int32_t num_window_blocks;   // of the layers with windows, if they have blocks of their own

  int group_size() const { return num_ranks > 1 ? num_ranks : 1; }
};

// The shapes and constants of one layer.
struct LayerSpec {
  int32_t num_heads, num_kv_heads, head_dim;  // of the attention; 0: the layer has none
  // Tokens that each token attends to, itself included; 0: all. In an encoder as many lie on its other side.
  int32_t window;
  int32_t rope;                  // index of the table of RoPE angles; -1: heads are not rotated
  int32_t rotary_dim;            // channels of a head that RoPE rotates
  int32_t has_position_biases;   // whether scores have position biases
  int32_t joins_head_norms;      // whether a norm of queries or keys spans all heads of a token
  float score_scale;             // factor of attention scores; 0: 1 / sqrt(head_dim)
  float score_cap;               // a score s becomes cap * tanh(s / cap); 0: it stays.
  int32_t intermediate;          // of the MLP, or of each expert; 0: the layer has no MLP
  int32_t activation, is_gated;  // of the MLP
  // Of a clamped gate g beside u, both at most gate_limit and u at least -gate_limit: g * sigmoid(gate_slope * g) * (u + 1).
  // 0: the gate is not clamped.
  float gate_limit, gate_slope;
  int32_t num_experts, experts_per_token;  // 0: one MLP
  int32_t normalizes_experts;              // whether the weights of a token's experts are divided by their sum.
  int32_t is_parallel;                     // whether the MLP reads the same input as the attention
  // Norms of the hidden state before attention and MLP, and norms of their outputs.
  int32_t has_attention_norm, has_mlp_norm, has_attention_output_norm, has_mlp_output_norm;
  // Whether a query of the attention is followed by a gate, whose sigmoid multiplies the head's output.
  int32_t has_output_gate;
  // Of a recurrent mixer: the tokens that its convolution reads, and its channels; 0 taps: the layer has none.
  int32_t taps, channels;
  // Of a delta rule, and of a state space: there groups of heads are its key heads, and the size of a state is key_dim.
  // 0 value heads: the mixer is a short convolution.
  int32_t key_heads, value_heads, key_dim, value_dim;
  float head_norm_eps;
  int32_t is_state_space;
  int32_t tiles_values;  // whether value head h belongs to key head h % key_heads, instead of h / (value heads of each)
  // Of experts: the last ones, which every token has; whether a share is the sigmoid of a score; a factor of the shares.
  int32_t shared_experts, shares_by_sigmoid;
  float expert_scale;
  int32_t source;            // 1 + the layer whose keys and values this one reads; 0: it has its own
  int32_t has_value_norm;    // whether values have an RMS norm without weights
  int32_t token_activation;  // of the gate of tokens' own embeddings
  // Norms of the hidden state once the output of the attention or of the MLP is added. They replace it.
  int32_t has_attention_sum_norm, has_mlp_sum_norm;
  int32_t has_head_gates;  // whether a number for each head, as a sigmoid, multiplies the head's output
  // Factors of what the heads of the attention return, of a recurrent mixer's outputs, of a state space's gates and
  // durations, of an MLP's gate before its activation, and of its outputs.
  float attention_factor, mixer_factor, state_gate_factor, duration_factor, gate_factor, mlp_factor;
  int32_t query_growth;  // 1 + the index of the table of factors of queries; 0: they have none.
  // Of each expert of a mixture beside the MLP, whose outputs are normed and added to the MLP's; 0: experts are the MLP.
  int32_t expert_intermediate;
  int32_t has_router_norm;  // whether the router reads the hidden state through a norm of its own
  int32_t is_windowed;      // whether the keys and values that it reads are in the blocks of windows

  int all_experts() const { return num_experts + shared_experts; }
  bool has_mixture() const { return expert_intermediate > 0; }  // beside the MLP
  int expert_size() const { return has_mixture() ? expert_intermediate : intermediate; }
  // Experts that are computed for a token.
  int entries_per_token() const { return experts_per_token + shared_experts; }
  bool attends() const { return num_heads > 0; }
  bool has_keys() const { return attends() && source == 0; }  // of its own
  bool recurs() const { return taps > 0; }
  bool mixes() const { return attends() || recurs(); }
  bool has_two_mixers() const { return attends() && recurs(); }
  bool has_states() const { return value_heads > 0; }  // of value heads, behind the convolution
  int key_head_of(int head) const { return tiles_values ? head % key_heads : head / (value_heads / key_heads); }
  bool has_mlp() const { return intermediate > 0; }
  int queries() const { return num_heads * head_dim; }
  int keys() const { return num_kv_heads * head_dim; }
  // Rows from one query of the first matrix to the next one, and of all queries.
  int query_stride() const { return has_output_gate ? 2 * head_dim : head_dim; }
  int query_rows() const { return num_heads * query_stride(); }
  // Outputs of a recurrent mixer.
  int mixed() const { return has_states() ? value_heads * value_dim : channels; }
  // Rows of the layer's first matrix for the attention. Those of a recurrent mixer follow.
  int attention_rows() const { return query_rows() + (has_keys() ? 2 * keys() : 0); }
  int recurrent_rows() const {
    if (is_state_space) return mixed() + channels + value_heads;
    return has_states() ? channels + mixed() : 3 * channels;
  }
  int projected() const { return attention_rows() + (recurs() ? recurrent_rows() : 0); }
  // Where a recurrent mixer's inputs begin, and where they have what is convolved: a state space has its gates before that.
  int first_input() const { return attention_rows(); }
  int first_channel() const { return first_input() + (is_state_space ? mixed() : 0); }
  // Where a recurrent mixer's outputs begin: behind those of the attention, at a multiple of 32.
  int first_output() const { return (queries() + 31) / 32 * 32; }
  // Outputs of all mixers, with the padding between them.
  int outputs() const { return recurs() ? first_output() + mixed() : queries(); }
  // Numbers of a state: the last inputs of the convolution, then a matrix [key_dim, value_dim] of each value head.
  size_t state_numbers() const {
    return recurs() ? (size_t)(taps - 1) * channels + (size_t)value_heads * key_dim * value_dim : 0;
  }
  bool has_output_norms() const { return has_attention_output_norm || has_mlp_output_norm; }
  int group() const { return num_heads / num_kv_heads; }
  // The panels of the first matrix of an MLP or an expert with so many channels inside.
  int inner_panels(int size) const { return ((is_gated ? 2 : 1) * size + 31) / 32; }
};

// The largest of what `number` returns for each layer; 0 without layers.
template <class Number>
int largest_of_layers(const Spec& spec, const LayerSpec* layers, const Number& number) {
  int most = 0;
  for (int i = 0; i < spec.num_layers; ++i) most = std::max(most, (int)number(layers[i]));
  return most;
}

}  // namespace penstock
