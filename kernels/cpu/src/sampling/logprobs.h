// How likely a token is by a row of logits, and which ones are the likeliest, without a sort of the vocabulary.
//
// The values are those of penstock.kernels.reference.sampler.logprobs_of.
#pragma once
#include <cstdint>

namespace penstock {

// Writes 1 + count ids and values: those of `token`, then the likeliest, the best first and of equal ones the lowest.
void write_logprobs(const float* logits, int vocab, int32_t token, int count, int32_t* ids, float* values);

}  // namespace penstock
