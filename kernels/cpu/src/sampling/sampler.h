// One token from one row of logits, by that row's own rules, without a sort of the vocabulary.
//
// The order of the rules, and what each means, is that of penstock.kernels.reference.sampler.
#pragma once
#include <cstdint>

namespace penstock {

constexpr int32_t kFailedToken = -1;

struct SamplingRule {
  float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k;
  int32_t choice, position;
  uint64_t seed;
  const int32_t* seen;  // the row's tokens so far, of which the first num_seen_prompt are prompt
  int32_t num_seen, num_seen_prompt;
  const int32_t* banned;
  int32_t num_banned;
  const int32_t* biased;  // tokens whose logits are moved by `biases`
  const float* biases;
  int32_t num_biased;
  const uint32_t* mask;  // a bit for each token: whether it may be chosen; null where all may

  bool changes_logits() const { return num_seen > 0 || num_banned > 0 || num_biased > 0 || mask; }
  // Whether the largest logit decides, so that nobody needs the others.
  bool is_plain_greedy() const { return temperature == 0 && !changes_logits(); }
};

// Overwrites `logits`; answers kFailedToken when one of them is NaN or +infinity.
int32_t sample(float* logits, int vocab, const SamplingRule& rule);

// The random number in [0, 1) of (seed, choice, position): Philox4x32-10, Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3".
double sampling_uniform(uint64_t seed, int32_t choice, int32_t position);

}  // namespace penstock
