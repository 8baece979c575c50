// The log-probabilities of the tokens that follow scored tokens of prompts.
#pragma once
#include "gemm/activations.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "ranks/group.h"
#include "ranks/share.h"
#include "weights/decoder_weights.h"

namespace penstock {

class ScoreStage {
 public:
  ScoreStage(const Spec& spec, const Share& share, RankGroup& group, const Norm& norm, const Matrix& head,
             const Step& step, const StepBuffers& buffers)
      : spec_(spec),
        share_(share),
        group_(group),
        vocab_(spec.vocab),
        norm_(norm),
        head_(head),
        step_(step),
        buffers_(buffers),
        logits_(spec.vocab) {}

  // Places what the ranks share.
  void place(Arena& arena);
  // Reserves memory for the step.
  void prepare();
  void run(Worker& worker);

 private:
  void project(Worker& worker, int first, int rows);
  void write(int first, int row) const;

  const Spec& spec_;
  const Share& share_;
  RankGroup& group_;
  const int vocab_;
  const Norm& norm_;
  const Matrix& head_;
  const Step& step_;
  const StepBuffers& buffers_;
  Activations inputs_;
  RowBuffer logits_;
};

}  // namespace penstock
