// Recurrent mixers: the gated delta rule, the state space of Mamba-2 and the short convolution, and the states of all slots.
//
// A sequence's tokens are computed one after another, in one call for all of the step. A state after some tokens has
// therefore the same bits, however these tokens were divided among steps. Threads share sequences, heads and columns.
#pragma once
#include <vector>

#include "model/step.h"
#include "model/step_buffers.h"
#include "threads/team.h"
#include "weights/adapters.h"
#include "weights/decoder_weights.h"

namespace penstock {

// Columns of a value head's matrix that are computed together. They lie side by side, in 16 KiB for keys of 128
// channels, so that they stay in the first-level cache from token to token.
constexpr int kStateColumns = 2 * kLanes;
constexpr int kMaxTaps = 64;

class RecurrentStage {
 public:
  // layers: [spec.num_layers].
  RecurrentStage(const Spec& spec, const LayerSpec* layers, const Step& step, const Adapters& adapters,
                 const StepBuffers& buffers);

  // Plans the step.
  void prepare();
  // Continues the states of a layer by all tokens. Reads the rows of `qkv`, and writes those of `attended`.
  void mix(Worker& worker, const Layer& layer);

 private:
  // The tokens of a sequence in this step, and its saves among those of the plan.
  struct Tokens {
    int begin, end;
    int first_save, end_save;
  };

  // A layer's state in a slot; null for a negative one.
  float* state_of(const Layer& layer, int slot) const {
    return slot < 0 ? nullptr : states_.data() + slot * slot_numbers_ + first_numbers_[layer.index];
  }
  // Numbers of a state before the matrices.
  static size_t known_numbers(const LayerSpec& spec) { return (size_t)(spec.taps - 1) * spec.channels; }

  // What is convolved of a token.
  float* inputs_of(const Layer& layer, int token) const { return buffers_.qkv.row(token) + layer.spec.first_channel(); }
  // All inputs of a token, and its outputs.
  float* input_row(const Layer& layer, int token) const { return buffers_.qkv.row(token) + layer.spec.first_input(); }
  float* output_row(const Layer& layer, int token) const {
    return buffers_.attended.row(token) + layer.spec.first_output();
  }

  void mix_states(Worker& worker, const Layer& layer);
  void set_durations(const Layer& layer, int token) const;
  template <int kVectors>
  void scan(const Layer& layer, int seq, int head, int block) const;
  void gate_group(const Layer& layer, int token, int group) const;
  void set_gates(const Layer& layer, int token) const;
  void adapt_gates(const Layer& layer, int token, const float* normed, float* gates) const;
  void convolve_head(const Layer& layer, int seq, int head) const;
  void convolve_channels(const Layer& layer, int seq, int first, int count) const;
  void keep_inputs(const Layer& layer, int seq, int first, int count) const;
  void learn(const Layer& layer, int seq, int head, int block) const;
  void gate_head(const Layer& layer, int token, int head) const;
  void mix_short(const Layer& layer, int seq, int first, int count) const;

  const Step& step_;
  const Adapters& adapters_;
  const StepBuffers& buffers_;
  const int hidden_stride_;
  std::vector<size_t> first_numbers_;  // by layer: where its state begins in a slot
  size_t slot_numbers_ = 0;
  Buffer<float> states_;  // by slot
  Buffer<float> zeros_;   // a row of inputs before a text begins
  std::vector<Tokens> tokens_;
  Buffer<float> inner_;  // by token: what an adapter shrinks it to, if a sequence of the step has one
};

}  // namespace penstock
