// The hidden states of pooled tokens after the final norm.
#pragma once
#include "model/step.h"
#include "model/step_buffers.h"
#include "threads/team.h"
#include "weights/decoder_weights.h"

namespace penstock {

class HiddenStage {
 public:
  HiddenStage(int hidden, const DecoderWeights& weights, const Step& step, const StepBuffers& buffers)
      : hidden_(hidden), weights_(weights), step_(step), buffers_(buffers) {}

  // Writes the hidden states as the checkpoint's model has them, whether this model is rotated or not.
  void run(Worker& worker) const;

 private:
  const int hidden_;
  const DecoderWeights& weights_;
  const Step& step_;
  const StepBuffers& buffers_;
};

}  // namespace penstock
