#include "model/head_stage.h"

#include <algorithm>
#include <limits>

#include "gemm/gemm.h"
#include "sampling/logprobs.h"
#include "sampling/sampler.h"

namespace penstock {
namespace {

SamplingRule rule_of(const Plan& p, int row) {
  return {.temperature = p.temperature[row],
          .top_p = p.top_p[row],
          .min_p = p.min_p[row],
          .repetition_penalty = p.repetition_penalty[row],
          .presence_penalty = p.presence_penalty[row],
          .frequency_penalty = p.frequency_penalty[row],
          .top_k = p.top_k[row],
          .choice = p.choice[row],
          .position = p.position[row],
          .seed = p.seed[row],
          .seen = p.seen ? p.seen[row] : nullptr,
          .num_seen = p.seen ? p.num_seen[row] : 0,
          .num_seen_prompt = p.seen ? p.num_seen_prompt[row] : 0,
          .banned = p.banned ? p.banned[row] : nullptr,
          .num_banned = p.banned ? p.num_banned[row] : 0,
          .biased = p.biased ? p.biased[row] : nullptr,
          .biases = p.biased ? p.biases[row] : nullptr,
          .num_biased = p.biased ? p.num_biased[row] : 0,
          .mask = p.masks ? p.masks[row] : nullptr};
}

}  // namespace

void HeadStage::plan_rows() {
  num_kept_ = 0;
  if (!group_.leads()) return;
  for (int i = 0; i < step_.num_chosen; ++i) num_kept_ += keeps_all(i);
}

bool HeadStage::keeps_all(int row) const {
  return step_.plan.logits || wants_logprobs(row) || !rule_of(step_.plan, row).is_plain_greedy();
}

void HeadStage::place(Arena& arena) {
  Buffer<int> logits_row = arena.place<int>(step_.num_chosen);
  Buffer<BestLogit> bests = arena.place<BestLogit>((size_t)group_.size() * step_.num_chosen);
  // The logits come last: only the rank that leads knows how many there are.
  logits_.place(arena, num_kept_);
  if (arena.only_counts()) return;
  logits_row_ = std::move(logits_row);
  bests_of_ranks_ = std::move(bests);
}

void HeadStage::prepare(int num_threads) {
  const int rows = step_.num_chosen;
  if (group_.is_alone()) {
    logits_row_.reserve(rows);
    logits_.reserve(num_kept_);
  }
  if (group_.leads()) {
    for (int i = 0, kept = 0; i < rows; ++i) logits_row_[i] = keeps_all(i) ? kept++ : -1;
  }
  inputs_.prepare(rows, head_);
  bests_.reset(rows, num_threads);
  poisoned_.assign(rows, 0);
}

void HeadStage::project(Worker& worker) {
  if (step_.num_chosen == 0) return;
  worker.for_each(step_.num_chosen, [&](int i) {
    const NormedRow normed = norm_.apply(buffers_.hidden.row(step_.head_tokens[i]));
    inputs_.set_row(i, normed.values);
    poisoned_[i] = !normed.is_finite;
  });
  multiply(worker, inputs_, head_, share_.head_panels(),
           [&](int first, int count, int panel, float* out) { note_logits(worker, first, count, panel, out); });
  if (group_.is_alone()) return;
  worker.for_each(step_.num_chosen, [&](int i) { best_of(group_.rank(), i) = bests_.best(i); });
  group_.meet(worker);
}

// Keeps a row's best logit so far, by thread; or all of its logits if they are needed.
void HeadStage::note_logits(Worker& worker, int first, int rows, int panel, float* out) {
  const int columns = std::min(kPanel, vocab_ - panel * kPanel);
  for (int r = 0; r < rows; ++r) {
    float* logits = out + r * kPanel;
    finish_logits(spec_, logits);
    std::fill(logits + columns, logits + kPanel, -std::numeric_limits<float>::infinity());
    if (keeps_logits(first + r)) {
      copy_panel(logits, logits_of(first + r) + panel * kPanel);
    } else {
      bests_.note(worker.index(), first + r, panel, logits);
    }
  }
}

void HeadStage::choose(Worker& worker) const {
  if (step_.num_chosen == 0) return;
  const Plan& plan = step_.plan;
  if (plan.logits) {
    worker.for_each(step_.num_chosen,
                    [&](int i) { std::copy_n(logits_of(i), vocab_, plan.logits + (size_t)i * vocab_); });
    return;
  }
  await_masks(worker);
  worker.for_each(step_.num_chosen, [&](int i) { plan.tokens[i] = poisoned_[i] ? kFailedToken : choose_one(i); });
}

void HeadStage::await_masks(Worker& worker) const {
  const Plan& plan = step_.plan;
  if (!plan.masks) return;
  if (worker.leads()) poll_until([&] { return __atomic_load_n(plan.masks_written, __ATOMIC_ACQUIRE) != 0; });
  worker.for_each(0, [](int) {});  // the other threads sleep at this barrier
}

int32_t HeadStage::choose_one(int row) const {
  const Plan& plan = step_.plan;
  if (!keeps_logits(row)) {
    BestLogit best = bests_.best(row);
    for (int rank = 1; rank < group_.size(); ++rank) best.join(best_of(rank, row));
    return best.chosen();
  }
  if (!wants_logprobs(row)) return sample(logits_of(row), vocab_, rule_of(plan, row));
  thread_local std::vector<float> raw;
  raw.assign(logits_of(row), logits_of(row) + vocab_);
  const int32_t token = sample(logits_of(row), vocab_, rule_of(plan, row));
  if (token == kFailedToken) return token;
  const size_t at = (size_t)row * plan.logprobs_width;
  const int count = std::min(plan.num_logprobs[row], plan.logprobs_width - 1);
  write_logprobs(raw.data(), vocab_, token, count, plan.logprob_ids + at, plan.logprobs + at);
  return token;
}

}  // namespace penstock
