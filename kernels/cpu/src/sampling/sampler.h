// Samples one token from one row of logits by the row's own rules, without sorting the vocabulary.
//
// The rules and their order are those of penstock.kernels.reference.sampler.
#pragma once
#include <cstdint>

namespace penstock {

constexpr int32_t kFailedToken = -1;

struct SamplingRule {
  float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k;
  int32_t choice, position;
  uint64_t seed;
  const int32_t* seen;  // the row's tokens so far; the first num_seen_prompt are the prompt
  int32_t num_seen, num_seen_prompt;
  const int32_t* banned;
  int32_t num_banned;
  const int32_t* biased;  // tokens to whose logits `biases` are added
  const float* biases;
  int32_t num_biased;
  const uint32_t* mask;  // one bit per token: whether it may be chosen; null if all may

  bool changes_logits() const { return num_seen > 0 || num_banned > 0 || num_biased > 0 || mask; }
  // Whether the largest logit alone decides, so that the other logits need not be kept.
  bool is_plain_greedy() const { return temperature == 0 && !changes_logits(); }
};

// Overwrites `logits`. Returns kFailedToken if one of them is NaN or +infinity.
int32_t sample(float* logits, int vocab, const SamplingRule& rule);

// Returns the random number in [0, 1) for (seed, choice, position), by Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3").
double sampling_uniform(uint64_t seed, int32_t choice, int32_t position);

}  // namespace penstock
