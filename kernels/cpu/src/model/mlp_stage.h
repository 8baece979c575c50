// The MLP of a layer: two products with an activation between them.
#pragma once
#include "model/layer_products.h"
#include "model/step_buffers.h"
#include "weights/decoder_weights.h"

namespace penstock {

Floats activated(Activation kind, Floats x);

// Applies the activation to one panel of the inner products of an MLP or an expert with `size` channels inside, and
// writes the row that the second matrix reads.
// Behind the last panel it clears the row's padding, where a wider layer may have left numbers.
void activate(const LayerSpec& spec, int size, const float* inner, int panel, float* row);

class MlpStage {
 public:
  MlpStage(RankGroup& group, const DecoderWeights& weights, const StepBuffers& buffers)
      : group_(group), weights_(weights), buffers_(buffers) {}

  // Adds the output of the MLP to the hidden state. `mixed`: the outputs of a mixture beside it, by row of the products;
  // null without one. `pending`: a norm that is applied to the hidden states first, or null.
  void run(Worker& worker, const Layer& layer, LayerProducts& products, const RowBuffer* mixed,
           const Norm* pending) const;

 private:
  const float* gated_row(const Layer& layer, const HadamardRotation* rotation, int row) const;

  RankGroup& group_;
  const DecoderWeights& weights_;
  const StepBuffers& buffers_;
};

}  // namespace penstock
