// The weights of a decoder: its matrices, norms and position tables.
#pragma once
#include <array>
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

  // row: [hidden], padded to whole panels. The result may be the row itself.
  NormedRow apply(const float* row) const;

  Buffer<float> weight;
  Buffer<float> bias;  // of layer norms

 private:
  bool is_present_, is_layer_norm_;
  int count_, padded_;
  float eps_;
};

// The matrices of a model.
enum class Slot : int { kQkv = 0, kOut = 1, kMlpIn = 2, kMlpOut = 3, kEmbedding = 4, kHead = 5 };
constexpr int kLayerSlots = 4;

struct Layer {
  int index;
  Norm attention_norm, mlp_norm;
  Norm attention_output_norm, mlp_output_norm;
  Buffer<float> q_norm, k_norm;  // RMS norms of heads, or empty
  Buffer<float> router;          // [num_experts][hidden, padded to whole panels]
  // By slot. Rows of kQkv: queries, keys, values. Rows of kMlpIn: gate and up projections, interleaved by half panels,
  // if the MLP is gated. The rows of all experts' matrices follow one another.
  std::array<Matrix, kLayerSlots> matrices;
  int window = 0;  // tokens that each token attends to, itself included; 0: all
  int rope = 0;    // index of the RoPE table; -1: queries and keys are not rotated

  Layer(const Spec& spec, int index)
      : index(index),
        attention_norm(spec, spec.has_input_norms),
        mlp_norm(spec, spec.has_input_norms),
        attention_output_norm(spec, spec.has_output_norms),
        mlp_output_norm(spec, spec.has_output_norms) {}

  Matrix& matrix(Slot slot) { return matrices[(int)slot]; }
  const Matrix& matrix(Slot slot) const { return matrices[(int)slot]; }
};

struct RopeTable {
  Buffer<float> cos, sin;  // [max_position, rotary_dim / 2]
};

struct PositionTables {
  std::vector<RopeTable> ropes;
  Buffer<float> biases;  // [num_heads, max_position rounded up to whole chunks], without RoPE
};

class DecoderWeights {
 public:
  explicit DecoderWeights(const Spec& spec);

  Matrix& matrix(Slot slot, int layer);
  // The matrix whose rows embed the tokens.
  const Matrix& embedding_rows() const { return embedding.rows ? embedding : head; }

  // Packs rows of a checkpoint. `gains`: the weights of the norm before the matrix if the model is rotated, else
  // null.
  void fill(Team& team, Slot slot, int layer, const Part& part, const float* gains);
  // Sets a matrix's biases from row `first` of a part on. Biases that are never set stay zero.
  void set_bias(Slot slot, int layer, RowLayout layout, int first, const float* values, int count);
  // How the checkpoint's rows of a matrix are transformed. `gains`: as for `fill`.
  WeightTransform transform_of(Slot slot, const float* gains) const;
  // Writes a hidden state after the final norm as the checkpoint's model has it. normed: padded; out: [hidden].
  void write_final(const float* normed, float* out) const;
  // The rotation of the gated products; null if the model is not rotated.
  const HadamardRotation* gated_rotation() const { return is_rotated_ ? &gated_rotation_ : nullptr; }

  std::vector<Layer> layers;
  Norm final_norm;
  Buffer<float> final_gains;  // [hidden]: the final norm's weights if the model is rotated; the head contains them too
  PositionTables positions;
  Matrix head;
  Matrix embedding;  // no rows if the head's matrix serves as embedding (tied weights)

 private:
  const bool is_rotated_;
  const int hidden_;
  const HadamardRotation hidden_rotation_, gated_rotation_;
};

}  // namespace penstock
