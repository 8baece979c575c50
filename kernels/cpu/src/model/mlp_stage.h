// The MLP of a layer: two products with an activation between them.
#pragma once
#include "gemm/hadamard.h"
#include "model/layer_products.h"
#include "model/step_buffers.h"
#include "weights/spec.h"

namespace penstock {

// Applies the activation to one panel of the MLP's inner products, and writes the row that the second matrix reads.
void activate(const Spec& spec, const float* inner, int panel, float* row);

class MlpStage {
 public:
  // `rotation`: of the gated products; null if the model is not rotated.
  MlpStage(const Spec& spec, RankGroup& group, const HadamardRotation* rotation, const StepBuffers& buffers)
      : spec_(spec), group_(group), rotation_(rotation), buffers_(buffers) {}

  // Adds the output of the MLP to the hidden state.
  void run(Worker& worker, const Layer& layer, LayerProducts& products) const;

 private:
  const float* gated_row(int row) const;

  const Spec& spec_;
  RankGroup& group_;
  const HadamardRotation* rotation_;
  const StepBuffers& buffers_;
};

}  // namespace penstock
