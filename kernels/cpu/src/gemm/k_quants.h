// Converts GGUF's formats with blocks of 256 weights to floats.
#pragma once
#include "simd/simd.h"

namespace penstock {

constexpr int kKBlock = 256;

void widen_q4_k(const uint8_t* data, int num_blocks, float* out);
void widen_q5_k(const uint8_t* data, int num_blocks, float* out);
void widen_q6_k(const uint8_t* data, int num_blocks, float* out);

}  // namespace penstock
