// The end of a step: logits of the rows that sample, and their tokens.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "gemm.h"
#include "model.h"

namespace penstock {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

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
    for (int i = 0; i < plan_.num_samples; ++i) head_tokens_.push_back(plan_.query_starts[plan_.sample_seqs[i] + 1] - 1);
  }
  int kept = 0;
  logits_row_.assign(head_tokens_.size(), -1);
  for (size_t i = 0; i < head_tokens_.size(); ++i) {
    if (plan_.logits || !rule((int)i).is_plain_greedy()) logits_row_[i] = kept++;
  }
  logits_.reserve((size_t)kept * logits_stride_);
}

void Model::project_head(Member& member) {
  member.for_each((int)head_tokens_.size(), [&](int i) {
    bool finite;
    head_in_.set_row(i, normed(head_tokens_[i], final_norm, &finite));
    poisoned_[i] = !finite;
  });
  multiply(member, head_in_, head, [&](int first, int count, int panel, float* out) {
    note_logits(member, first, count, panel, out);
  });
}

// Keeps each row's best logit so far, by thread, and the logits themselves where they are asked for.
void Model::note_logits(Member& member, int first, int rows, int panel, float* out) {
  const int columns = std::min(kPanel, spec_.vocab - panel * kPanel);
  for (int r = 0; r < rows; ++r) {
    float* logits = out + r * kPanel;
    std::fill(logits + columns, logits + kPanel, kLowest);
    if (keeps_logits(first + r)) {
      std::copy_n(logits, kPanel, logits_of(first + r) + panel * kPanel);
      continue;
    }
    Best& best = bests_[(size_t)member.index() * head_tokens_.size() + first + r];
    const Floats a = load(logits), b = load(logits + kLanes);
    best.finite &= (bits(equal(a, a)) & bits(equal(b, b))) == 0xffff;
    const Floats both = max(a, b);
    if (!bits(at_least(both, broadcast(best.value)))) continue;
    const float value = largest(both);
    const int token = panel * kPanel + (int)(std::find(logits, logits + kPanel, value) - logits);
    // Panels come in any order.
    if (value > best.value || token < best.token) std::tie(best.value, best.token) = std::tie(value, token);
  }
}

void Model::choose(Member& member) {
  const int rows = (int)head_tokens_.size();
  if (plan_.logits) {
    member.for_each(rows, [&](int i) {
      std::copy_n(logits_of(i), spec_.vocab,
                  plan_.logits + (size_t)i * spec_.vocab);
    });
    return;
  }
  await_masks();
  member.for_each(rows, [&](int i) {
    if (poisoned_[i]) {
      plan_.tokens[i] = kFailedToken;
    } else if (keeps_logits(i)) {
      plan_.tokens[i] = sample(logits_of(i), spec_.vocab, rule(i));
    } else {
      plan_.tokens[i] = best_of_threads(i);
    }
  });
}

void Model::await_masks() const {
  if (!plan_.masks) return;
  while (!__atomic_load_n(plan_.masks_written, __ATOMIC_ACQUIRE)) sched_yield();
}

// Of equal logits the lowest id wins, whichever thread saw it.
int32_t Model::best_of_threads(int row) const {
  Best best = bests_[row];
  for (int t = 1; t < team_.size(); ++t) {
    const Best& other = bests_[(size_t)t * head_tokens_.size() + row];
    best.finite &= other.finite;
    const bool wins = other.value > best.value || (other.value == best.value && other.token < best.token);
    if (wins) std::tie(best.value, best.token) = std::tie(other.value, other.token);
  }
  return best.finite && std::isfinite(best.value) ? best.token : kFailedToken;
}

}  // namespace penstock
