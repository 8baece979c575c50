// The end of a step: the logits of the rows that sample, and the tokens that they sample.
#pragma once
#include <vector>

#include "gemm/activations.h"
#include "weights/decoder_weights.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "sampling/best_logits.h"

namespace penstock {

// Scales and caps a panel of logits as the model asks for.
inline void finish_logits(const Spec& spec, float* logits) {
  if (spec.logit_scale == 1 && spec.logit_cap == 0) return;
  for (int i = 0; i < kPanel; i += kLanes) {
    const Floats scaled = load(logits + i) * broadcast(spec.logit_scale);
    store(logits + i, spec.logit_cap == 0 ? scaled : capped(scaled, spec.logit_cap));
  }
}

class HeadStage {
 public:
  HeadStage(const Spec& spec, const Norm& norm, const Matrix& head, const Step& step, const StepBuffers& buffers)
      : spec_(spec),
        vocab_(spec.vocab),
        norm_(norm),
        head_(head),
        step_(step),
        buffers_(buffers),
        logits_(spec.vocab) {}

  // Plans the step, and reserves memory for it.
  void prepare(int num_threads);
  // Computes the logits of the step's chosen rows.
  void project(Worker& worker);
  // Writes the tokens that the rows sample, or their logits if the plan asks for these.
  void choose(Worker& worker) const;

 private:
  bool wants_logprobs(int row) const { return step_.plan.num_logprobs && step_.plan.num_logprobs[row] >= 0; }
  bool keeps_logits(int row) const { return logits_row_[row] >= 0; }
  float* logits_of(int row) const { return logits_.row(logits_row_[row]); }
  void note_logits(Worker& worker, int first, int rows, int panel, float* out);
  void await_masks(Worker& worker) const;
  int32_t choose_one(int row) const;

  const Spec& spec_;
  const int vocab_;
  const Norm& norm_;
  const Matrix& head_;
  const Step& step_;
  const StepBuffers& buffers_;
  Activations inputs_;
  std::vector<char> poisoned_;   // by row: whether its hidden state is not finite
  std::vector<int> logits_row_;  // by row: its row of logits_; -1 if only the best logit is kept
  RowBuffer logits_;
  BestLogits bests_;
};

}  // namespace penstock
