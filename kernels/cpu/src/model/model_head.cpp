// The end of a step: the logits of the rows that sample, and the tokens that they sample.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "gemm/gemm.h"
#include "sampling/logprobs.h"
#include "model/model.h"

namespace penstock {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Rows that are scored at once: the logits of a whole prompt would take more memory than the model.
constexpr int kScoredAtOnce = 64;

}  // namespace

SamplingRule Model::rule(int row) const {
  const Plan& p = plan_;
  return {p.temperature[row], p.top_p[row], p.min_p[row], p.repetition_penalty[row], p.presence_penalty[row],
          p.frequency_penalty[row], p.top_k[row], p.choice[row], p.position[row], p.seed[row],
          p.seen ? p.seen[row] : nullptr, p.seen ? p.num_seen[row] : 0, p.seen ? p.num_seen_prompt[row] : 0,
          p.banned ? p.banned[row] : nullptr, p.banned ? p.num_banned[row] : 0,
          p.biased ? p.biased[row] : nullptr, p.biased ? p.biases[row] : nullptr, p.biased ? p.num_biased[row] : 0,
          p.masks ? p.masks[row] : nullptr};
}

void Model::plan_head() {
  head_tokens_.clear();
  if (plan_.logits) {
    for (int i = 0; i < plan_.num_tokens; ++i) head_tokens_.push_back(i);
  } else {
    head_tokens_.assign(plan_.sample_tokens, plan_.sample_tokens + plan_.num_samples);
  }
  num_chosen_ = (int)head_tokens_.size();
  head_tokens_.insert(head_tokens_.end(), plan_.scored_tokens, plan_.scored_tokens + plan_.num_scored);
  int kept = 0;
  logits_row_.assign(num_chosen_, -1);
  for (int i = 0; i < num_chosen_; ++i) {
    if (plan_.logits || wants_logprobs(i) || !rule(i).is_plain_greedy()) logits_row_[i] = kept++;
  }
  logits_.reserve((size_t)kept * logits_stride_);
}

void Model::reserve_head() {
  head_in_.prepare(num_chosen_, spec_.hidden, head.format);
  bests_.assign((size_t)num_chosen_ * team_.size(), {kLowest, 0, true});
  poisoned_.assign(num_chosen_, 0);
  if (plan_.num_scored == 0) return;
  const int rows = std::min(kScoredAtOnce, plan_.num_scored);
  scored_in_.prepare(rows, spec_.hidden, head.format);
  scored_logits_.reserve((size_t)rows * logits_stride_);
}

void Model::project_head(Worker& worker) {
  worker.for_each(num_chosen_, [&](int i) {
    bool finite;
    head_in_.set_row(i, normed(head_tokens_[i], final_norm, &finite));
    poisoned_[i] = !finite;
  });
  multiply(worker, head_in_, head, [&](int first, int count, int panel, float* out) {
    note_logits(worker, first, count, panel, out);
  });
}

// Keeps a row's best logit so far, by thread; or all of its logits if they are needed.
void Model::note_logits(Worker& worker, int first, int rows, int panel, float* out) {
  const int columns = std::min(kPanel, spec_.vocab - panel * kPanel);
  for (int r = 0; r < rows; ++r) {
    float* logits = out + r * kPanel;
    std::fill(logits + columns, logits + kPanel, kLowest);
    if (keeps_logits(first + r)) {
      std::copy_n(logits, kPanel, logits_of(first + r) + panel * kPanel);
      continue;
    }
    Best& best = bests_[(size_t)worker.index() * num_chosen_ + first + r];
    const Floats a = load(logits), b = load(logits + kLanes);
    best.finite &= (bits(equal(a, a)) & bits(equal(b, b))) == 0xffff;
    const Floats both = max(a, b);
    if (!bits(at_least(both, broadcast(best.value)))) continue;
    const float value = largest(both);
    const int token = panel * kPanel + (int)(std::find(logits, logits + kPanel, value) - logits);
    // Panels come in any order, so compare the ids as well.
    if (value > best.value || token < best.token) std::tie(best.value, best.token) = std::tie(value, token);
  }
}

void Model::choose(Worker& worker) {
  if (plan_.logits) {
    worker.for_each(num_chosen_, [&](int i) {
      std::copy_n(logits_of(i), spec_.vocab,
                  plan_.logits + (size_t)i * spec_.vocab);
    });
    return;
  }
  await_masks(worker);
  worker.for_each(num_chosen_, [&](int i) { plan_.tokens[i] = poisoned_[i] ? kFailedToken : choose_one(i); });
}

int32_t Model::choose_one(int row) {
  if (!keeps_logits(row)) return best_of_threads(row);
  if (!wants_logprobs(row)) return sample(logits_of(row), spec_.vocab, rule(row));
  thread_local std::vector<float> raw;
  raw.assign(logits_of(row), logits_of(row) + spec_.vocab);
  const int32_t token = sample(logits_of(row), spec_.vocab, rule(row));
  if (token == kFailedToken) return token;
  const size_t at = (size_t)row * plan_.logprobs_width;
  const int count = std::min(plan_.num_logprobs[row], plan_.logprobs_width - 1);
  write_logprobs(raw.data(), spec_.vocab, token, count, plan_.logprob_ids + at, plan_.logprobs + at);
  return token;
}

// Writes the log-probabilities of the tokens that follow scored tokens of prompts.
void Model::score(Worker& worker) {
  for (int first = 0; first < plan_.num_scored; first += kScoredAtOnce) {
    const int rows = std::min(kScoredAtOnce, plan_.num_scored - first);
    worker.for_each(rows, [&](int i) {
      bool finite;
      scored_in_.set_row(i, normed(head_tokens_[num_chosen_ + first + i], final_norm, &finite));
    });
    multiply(worker, scored_in_, head, [&](int begin, int count, int panel, const float* out) {
      for (int r = 0; r < count; ++r) {
        std::copy_n(out + r * kPanel, kPanel, scored_logits_.data() + (size_t)(begin + r) * logits_stride_ + panel * kPanel);
      }
    });
    worker.for_each(rows, [&](int i) {
      const size_t at = (size_t)(first + i) * plan_.scores_width;
      const int count = std::min(plan_.num_score_logprobs[first + i], plan_.scores_width - 1);
      write_logprobs(scored_logits_.data() + (size_t)i * logits_stride_, spec_.vocab, plan_.score_targets[first + i],
                     count, plan_.score_ids + at, plan_.scores + at);
    });
  }
}

void Model::await_masks(Worker& worker) const {
  if (!plan_.masks) return;
  if (worker.leads()) poll_until([&] { return __atomic_load_n(plan_.masks_written, __ATOMIC_ACQUIRE) != 0; });
  worker.for_each(0, [](int) {});  // the other threads sleep at this barrier
}

// Returns the best token over all threads. Of equal logits the lowest id wins, whichever thread found it.
int32_t Model::best_of_threads(int row) const {
  Best best = bests_[row];
  for (int t = 1; t < team_.size(); ++t) {
    const Best& other = bests_[(size_t)t * num_chosen_ + row];
    best.finite &= other.finite;
    const bool wins = other.value > best.value || (other.value == best.value && other.token < best.token);
    if (wins) std::tie(best.value, best.token) = std::tie(other.value, other.token);
  }
  return best.finite && std::isfinite(best.value) ? best.token : kFailedToken;
}

}  // namespace penstock
