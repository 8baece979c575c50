// The weights of a decoder or an encoder: its matrices, norms and position tables.
#pragma once
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "gemm/fill.h"
#include "gemm/hadamard.h"
#include "threads/team.h"
#include "weights/spec.h"
#include "weights/weights.h"

namespace penstock {

struct NormedRow {
  const float* values;  // padded to whole panels; valid until this thread's next norm
  bool is_finite;       // whether the row was finite
};

// A norm of the hidden state.
class Norm {
 public:
  // Without `is_present` the norm returns its input.
  explicit Norm(const Spec& spec, bool is_present = true);

  bool is_present() const { return is_present_; }
  // row: [hidden], padded to whole panels. The result may be the row itself.
  NormedRow apply(const float* row) const;
  // Norms a row where it is. The norm must be present.
  void apply_in_place(float* row) const { write(row, row); }

  Buffer<float> weight;
  Buffer<float> bias;  // of layer norms

 private:
  // Returns whether the row is finite. `out` may be the row itself.
  bool write(const float* row, float* out) const;

  bool is_present_, is_layer_norm_;
  int count_, padded_;
  float eps_;
};

// The matrices of a model.
enum class Slot : int {
  kQkv = 0,
  kOut = 1,
  kMlpIn = 2,
  kMlpOut = 3,
  kTokenGate = 4,
  kTokenOut = 5,
  kMixerOut = 6,
  kExpertIn = 7,
  kExpertOut = 8,
  kGates = 9,  // of a delta rule's value heads: only adapters know this slot, RecurrentWeights has the matrix
  kEmbedding = 10,
  kHead = 11,
  kTokenInputs = 12
};
constexpr int kLayerSlots = 10;

// The small tensors of a recurrent mixer, as penstock.gpu_node.model.checkpoint.recurrences describes them.
struct RecurrentWeights {
  Buffer<float> convolution;  // [taps][channels], the weights of the oldest token first
  Buffer<float> bias;         // [channels], or empty
  Buffer<float> gates;        // [2 * value_heads][hidden, padded to whole panels]: of learning, then of the decay
  Buffer<float> decay_rates, decay_biases;  // [value_heads]; of a state space these biases are those of durations
  Buffer<float> skips;                      // [value_heads] of a state space: the share of values that is added
  Buffer<float> norm;                       // [value_dim]; of a state space [value_heads * value_dim], or empty
};

struct Layer {
  int index;
  LayerSpec spec;
  Norm attention_norm, mlp_norm;
  Norm attention_output_norm, mlp_output_norm;
  Norm token_norm;  // of what a token's own embedding adds
  Norm attention_sum_norm, mlp_sum_norm;
  // Of a mixture beside the MLP: of its input, of its output, and of the MLP's output before both are added.
  Norm expert_norm, expert_output_norm, dense_output_norm;
  Norm router_norm;
  Buffer<float> output_scale;    // one number, or empty: the factor of the hidden state behind the layer
  Buffer<float> q_norm, k_norm;  // RMS norms of heads, or empty
  Buffer<float> sinks;           // [num_heads], or empty: a score of each head that has no value
  Buffer<float> head_gates;      // [num_heads][hidden, padded to whole panels], or empty: gates of heads' outputs
  Buffer<float> router;          // [num_experts][hidden, padded to whole panels]
  Buffer<float> router_bias;     // [num_experts], or empty: added to scores
  Buffer<float> choice_bias;     // [num_experts], or empty: added to shares to choose experts
  Buffer<float> shared_gate;     // [hidden, padded], or empty: of the weight of the experts that every token has
  Buffer<float> expert_factors;  // [num_experts], or empty: factors of the weights of chosen experts
  RecurrentWeights recurrent;
  // By slot; a layer without attention or MLP leaves theirs empty. Rows of kQkv: queries, keys, values, then a recurrent mixer's
  // inputs. kExpertIn and kExpertOut: those of a mixture beside the MLP. kMixerOut: the second matrix of a recurrent mixer that stands beside attention. Rows of kMlpIn: gate and up projections, interleaved by half panels,
  // if the MLP is gated. The rows of all experts' matrices follow one another.
  std::array<Matrix, kLayerSlots> matrices;

  Layer(const Spec& model, const LayerSpec& spec, int index)
      : index(index),
        spec(spec),
        attention_norm(model, spec.has_attention_norm),
        mlp_norm(model, spec.has_mlp_norm),
        attention_output_norm(model, spec.has_attention_output_norm),
        mlp_output_norm(model, spec.has_mlp_output_norm),
        token_norm(model, model.token_size > 0),
        attention_sum_norm(model, spec.has_attention_sum_norm),
        mlp_sum_norm(model, spec.has_mlp_sum_norm),
        expert_norm(model, spec.has_mixture()),
        expert_output_norm(model, spec.has_mixture()),
        dense_output_norm(model, spec.has_mixture()),
        router_norm(model, spec.has_router_norm) {}

  // The layer whose keys and values it reads.
  int keys_of() const { return spec.source > 0 ? spec.source - 1 : index; }
  float output_factor() const { return output_scale.count() ? output_scale[0] : 1.f; }

  // The matrices of experts.
  Slot expert_in() const { return spec.has_mixture() ? Slot::kExpertIn : Slot::kMlpIn; }
  Slot expert_out() const { return spec.has_mixture() ? Slot::kExpertOut : Slot::kMlpOut; }

  Matrix& matrix(Slot slot) { return matrices[(int)slot]; }
  const Matrix& matrix(Slot slot) const { return matrices[(int)slot]; }
};

struct RopeTable {
  Buffer<float> cos, sin;  // [max_position, rotary_dim / 2], with the rotary_dim of the layers that use it
};

struct PositionTables {
  std::vector<RopeTable> ropes;
  std::vector<Buffer<float>> query_factors;  // [max_position] each
  Buffer<float> embeddings;  // [max_position][hidden, padded to whole panels], or empty: added to those of tokens
  Buffer<float> biases;      // [num_heads, max_position rounded up to whole chunks], for layers with position biases
};

class DecoderWeights {
 public:
  // layers: [spec.num_layers].
  DecoderWeights(const Spec& spec, const LayerSpec* layers);

  Matrix& matrix(Slot slot, int layer);
  // Rows and columns of a matrix.
  std::pair<int, int> shape_of(Slot slot, int layer);
  // The matrix whose rows embed the tokens.
  const Matrix& embedding_rows() const { return embedding.rows ? embedding : head; }

  // Packs rows of a checkpoint. `gains`: the weights of the norm before the matrix if the model is rotated, else
  // null.
  void fill(Team& team, Slot slot, int layer, const Part& part, const float* gains);
  // Sets a matrix's biases from row `first` of a part on. Biases that are never set stay zero.
  void set_bias(Slot slot, int layer, RowLayout layout, int first, const float* values, int count);
  // How the checkpoint's rows of a matrix are transformed. `gains`: as for `fill`.
  WeightTransform transform_of(Slot slot, int layer, const float* gains) const;
  // Writes a hidden state after the final norm as the checkpoint's model has it. normed: padded; out: [hidden].
  void write_final(const float* normed, float* out) const;
  // The rotation of a layer's gated products; null if the model is not rotated.
  const HadamardRotation* gated_rotation(const Layer& layer) const {
    return is_rotated_ ? &gated_rotations_.at(layer.spec.intermediate) : nullptr;
  }

  std::vector<Layer> layers;
  Norm final_norm;
  Norm embedding_norm;
  Buffer<float> type_embeddings;  // [types][hidden, padded to whole panels], or empty: added to those of tokens
  Buffer<float> final_gains;  // [hidden]: the final norm's weights if the model is rotated; the head contains them too
  PositionTables positions;
  Matrix head;
  Matrix token_inputs;             // [num_layers * token_size, hidden], or no rows
  Buffer<float> token_input_norm;  // [token_size]
  Matrix embedding;                // no rows if the head's matrix serves as embedding (tied weights)

 private:
  const bool is_rotated_;
  const int hidden_;
  const HadamardRotation hidden_rotation_;
  std::map<int, HadamardRotation> gated_rotations_;  // by the layer's intermediate size, if the model is rotated
};

}  // namespace penstock
