#include "model/score_stage.h"

#include <algorithm>

#include "gemm/gemm.h"
#include "model/head_stage.h"
#include "sampling/logprobs.h"

namespace penstock {
namespace {

// Rows that are scored at once: the logits of a whole prompt would take more memory than the model.
constexpr int kScoredAtOnce = 64;

}  // namespace

void ScoreStage::place(Arena& arena) { logits_.place(arena, std::min(kScoredAtOnce, step_.plan.num_scored)); }

void ScoreStage::prepare() {
  if (step_.plan.num_scored == 0) return;
  const int rows = std::min(kScoredAtOnce, step_.plan.num_scored);
  inputs_.prepare(rows, head_);
  if (group_.is_alone()) logits_.reserve(rows);
}

void ScoreStage::run(Worker& worker) {
  for (int first = 0; first < step_.plan.num_scored; first += kScoredAtOnce) {
    const int rows = std::min(kScoredAtOnce, step_.plan.num_scored - first);
    // The rank that leads has read the logits of the rows before.
    if (first > 0) group_.meet(worker);
    project(worker, first, rows);
    group_.meet(worker);
    if (group_.is_over()) return;
    if (group_.leads()) worker.for_each(rows, [&](int i) { write(first, i); });
  }
}

// Computes the logits of the scored tokens [first, first + rows).
void ScoreStage::project(Worker& worker, int first, int rows) {
  worker.for_each(rows, [&](int i) {
    const int token = step_.head_tokens[step_.num_chosen + first + i];
    inputs_.set_row(i, norm_.apply(buffers_.hidden.row(token)).values);
  });
  multiply(worker, inputs_, head_, share_.head_panels(), [&](int begin, int count, int panel, float* out) {
    for (int r = 0; r < count; ++r) {
      finish_logits(spec_, out + r * kPanel);
      copy_panel(out + r * kPanel, logits_.row(begin + r) + panel * kPanel);
    }
  });
}

// Writes the log-probabilities of the scored token `first + row`.
void ScoreStage::write(int first, int row) const {
  const Plan& plan = step_.plan;
  const int scored = first + row;
  const size_t at = (size_t)scored * plan.scores_width;
  const int count = std::min(plan.num_score_logprobs[scored], plan.scores_width - 1);
  write_logprobs(logits_.row(row), vocab_, plan.score_targets[scored], count, plan.score_ids + at, plan.scores + at);
}

}  // namespace penstock
