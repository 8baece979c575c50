// Log-probabilities of a token and of the most likely tokens of a row, without sorting the vocabulary.
//
// The values are those of penstock.kernels.reference.sampler.logprobs_of.
#pragma once
#include <cstdint>

namespace penstock {

// Writes 1 + count ids and values: those of `token`, then the most likely tokens, the best first. Of equal ones the
// lowest id comes first.
void write_logprobs(const float* logits, int vocab, int32_t token, int count, int32_t* ids, float* values);

}  // namespace penstock
