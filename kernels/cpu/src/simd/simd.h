// Vectors of sixteen lanes, the same for every instruction set, and the functions that are built from them.
#pragma once
#ifdef PENSTOCK_AVX512
#include "simd/avx512.h"
#else
#include "simd/avx2.h"
#endif

#include <cstring>

namespace penstock {

using bf16 = uint16_t;
using f16 = uint16_t;

constexpr int kLanes = 16;

PENSTOCK_INLINE int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// So that one function computes with the word of a row or with those of sixteen rows.
PENSTOCK_INLINE Ints operator<<(Ints x, int bits) { return shift_left(x, bits); }
PENSTOCK_INLINE Ints operator>>(Ints x, int bits) { return shift_right(x, bits); }
PENSTOCK_INLINE Ints operator&(Ints x, uint32_t y) { return x & broadcast_int((int32_t)y); }
PENSTOCK_INLINE Ints operator^(Ints x, uint32_t y) { return x ^ broadcast_int((int32_t)y); }
PENSTOCK_INLINE Ints operator+(Ints x, uint32_t y) { return x + broadcast_int((int32_t)y); }
PENSTOCK_INLINE void store_word(void* p, Ints x) { store_ints(static_cast<int32_t*>(p), x); }
PENSTOCK_INLINE void store_word(void* p, uint32_t x) { std::memcpy(p, &x, sizeof x); }

PENSTOCK_INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
PENSTOCK_INLINE float widen_f16(f16 x) { return _cvtsh_ss(x); }
PENSTOCK_INLINE f16 narrow_f16(float x) { return (f16)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
PENSTOCK_INLINE bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 2^t for t <= 0, with a relative error within 3e-7 + 6e-8 |t|. Below -126 the result is 2^-126; NaN stays NaN.
// Reduces the range to 2^n * 2^f, with a polynomial of degree 6 for 2^f on [-0.5, 0.5].
PENSTOCK_INLINE Floats exp2_of_negative(Floats t) {
  // The maximum instruction returns its second operand if either is NaN.
  t = max(broadcast(-126.f), t);
  const Floats n = round(t);
  const Floats f = t - n;
  Floats p = broadcast(1.5403530e-4f);
  p = fma(p, f, broadcast(1.3333558e-3f));
  p = fma(p, f, broadcast(9.6181291e-3f));
  p = fma(p, f, broadcast(5.5504109e-2f));
  p = fma(p, f, broadcast(2.4022651e-1f));
  p = fma(p, f, broadcast(6.9314718e-1f));
  p = fma(p, f, broadcast(1.f));
  return scale_by_power(p, n);
}

constexpr float kLog2E = 1.44269504088896341f;

// e^x for x <= 0, with a relative error within 3e-7 + 8e-8 |x|. Below -87 the result is about e^-87; NaN stays NaN.
PENSTOCK_INLINE Floats exp_of_negative(Floats x) { return exp2_of_negative(x * broadcast(kLog2E)); }

// x / (1 + e^-y), computed from the exponential of -|y| so that nothing overflows.
PENSTOCK_INLINE Floats gated_by(Floats x, Floats y) {
  const Floats e = exp_of_negative(zeros() - abs(y));
  const Floats numerator = select(greater(zeros(), y), e, broadcast(1.f));
  return x * numerator / (broadcast(1.f) + e);
}

PENSTOCK_INLINE Floats silu(Floats x) { return gated_by(x, x); }

// The square of what of x is above 0; NaN stays NaN.
PENSTOCK_INLINE Floats squared_relu(Floats x) {
  const Floats above = max(zeros(), x);
  return above * above;
}

// cap * tanh(x / cap), with an absolute error within 1e-6 cap.
PENSTOCK_INLINE Floats capped(Floats x, float cap) {
  const Floats share = gated_by(broadcast(1.f), x * broadcast(2.f / cap));
  return fma(share, broadcast(2.f * cap), broadcast(-cap));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
PENSTOCK_INLINE Floats gelu_tanh(Floats x) {
  const Floats cubic = fma(x * x, broadcast(0.044715f), broadcast(1.f)) * x;
  return gated_by(x, broadcast(1.5957691216f) * cubic);
}

// x times the normal distribution function at x, within 2e-7 |x|: erfc by Abramowitz and Stegun, 7.1.26.
PENSTOCK_INLINE Floats gelu(Floats x) {
  const Floats z = abs(x) * broadcast(0.70710678f);
  const Floats t = broadcast(1.f) / fma(z, broadcast(0.3275911f), broadcast(1.f));
  Floats p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  const Floats beyond = p * t * exp_of_negative(zeros() - z * z) * broadcast(0.5f);
  return x * select(greater(zeros(), x), beyond, broadcast(1.f) - beyond);
}

}  // namespace penstock
