// The embeddings that each token has for each layer, and how layers add them.
#pragma once
#include "gemm/activations.h"
#include "model/layer_products.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "weights/decoder_weights.h"

namespace penstock {

class TokenStage {
 public:
  TokenStage(const Spec& spec, const DecoderWeights& weights, const Step& step, const StepBuffers& buffers)
      : spec_(spec),
        weights_(weights),
        step_(step),
        buffers_(buffers),
        width_(spec.num_layers * spec.token_size),
        projected_(width_) {}

  // Reserves memory for the step.
  void prepare();
  // Adds to the embeddings of the step's tokens, in place, what their first hidden state says.
  void project(Worker& worker);
  // Adds the tokens' embeddings for a layer to their hidden states, and then scales these.
  void add(Worker& worker, const Layer& layer, LayerProducts& products) const;

 private:
  float* inputs_of(int token) const { return step_.plan.token_inputs + (size_t)token * width_; }

  const Spec& spec_;
  const DecoderWeights& weights_;
  const Step& step_;
  const StepBuffers& buffers_;
  const int width_;  // numbers of a token, of all layers
  Activations hidden_;
  RowBuffer projected_;  // by token
};

}  // namespace penstock
