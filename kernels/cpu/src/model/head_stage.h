// The end of a step: the logits of the rows that sample, and the tokens that they sample.
#pragma once
#include <vector>

#include "gemm/activations.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "ranks/group.h"
#include "ranks/share.h"
#include "sampling/best_logits.h"
#include "weights/decoder_weights.h"

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
  HeadStage(const Spec& spec, const Share& share, RankGroup& group, const Norm& norm, const Matrix& head,
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

  // Decides which rows keep all of their logits. Only the rank that leads knows it, and tells the others.
  void plan_rows();
  // Places what the ranks share.
  void place(Arena& arena);
  // Reserves memory for the step.
  void prepare(int num_threads);
  // Computes the logits of the step's chosen rows, of a rank those of its panels. The rank that leads then has all.
  void project(Worker& worker);
  // Writes the tokens that the rows sample, or their logits if the plan asks for these.
  void choose(Worker& worker) const;

 private:
  bool wants_logprobs(int row) const { return step_.plan.num_logprobs && step_.plan.num_logprobs[row] >= 0; }
  bool keeps_all(int row) const;
  bool keeps_logits(int row) const { return logits_row_[row] >= 0; }
  float* logits_of(int row) const { return logits_.row(logits_row_[row]); }
  BestLogit& best_of(int rank, int row) const { return bests_of_ranks_[(size_t)rank * step_.num_chosen + row]; }
  void note_logits(Worker& worker, int first, int rows, int panel, float* out);
  void await_masks(Worker& worker) const;
  int32_t choose_one(int row) const;

  const Spec& spec_;
  const Share& share_;
  RankGroup& group_;
  const int vocab_;
  const Norm& norm_;
  const Matrix& head_;
  const Step& step_;
  const StepBuffers& buffers_;
  Activations inputs_;
  std::vector<char> poisoned_;  // by row: whether its hidden state is not finite
  int num_kept_ = 0;            // rows that keep all of their logits
  Buffer<int> logits_row_;      // by row: its row of logits_; -1 if only the best logit is kept
  RowBuffer logits_;
  BestLogits bests_;
  Buffer<BestLogit> bests_of_ranks_;  // [ranks][rows]
};

}  // namespace penstock
