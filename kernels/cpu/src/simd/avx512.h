// Sixteen lanes in one AVX-512 register, with the dot products of VNNI, and those of BF16 where PENSTOCK_BF16 is defined.
// Without it, products of bf16 have the bits of avx2.h.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace penstock {

#ifdef PENSTOCK_BF16
constexpr const char* kIsa = "avx512";
#else
constexpr const char* kIsa = "avx512_vnni";
#endif

// Vectors of sixteen lanes that fit into the registers.
constexpr int kRegisters = 32;

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
// 64 bytes as an operand of a dot product: sixteen pairs of bf16 or sixteen groups of four bytes.
struct Bytes {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

PENSTOCK_INLINE Floats zeros() { return {_mm512_setzero_ps()}; }
PENSTOCK_INLINE Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
PENSTOCK_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
PENSTOCK_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
PENSTOCK_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PENSTOCK_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
PENSTOCK_INLINE Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
PENSTOCK_INLINE Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// a * 2^n for integral n.
PENSTOCK_INLINE Floats scale_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
PENSTOCK_INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
PENSTOCK_INLINE float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }

#ifdef PENSTOCK_BF16
PENSTOCK_INLINE void store_bf16(uint16_t* p, Floats a) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
#else
// Rounds to nearest even; a NaN stays NaN.
PENSTOCK_INLINE void store_bf16(uint16_t* p, Floats a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(words));
}
#endif
PENSTOCK_INLINE Floats load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PENSTOCK_INLINE void store_f16(uint16_t* p, Floats a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

PENSTOCK_INLINE Ints broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
PENSTOCK_INLINE Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
PENSTOCK_INLINE void store_ints(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
PENSTOCK_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
PENSTOCK_INLINE Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
PENSTOCK_INLINE Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
PENSTOCK_INLINE Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
PENSTOCK_INLINE Ints shift_left(Ints a, int bits) { return {_mm512_slli_epi32(a.v, bits)}; }
PENSTOCK_INLINE Ints shift_right(Ints a, int bits) { return {_mm512_srli_epi32(a.v, bits)}; }
PENSTOCK_INLINE Ints widen_s8(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PENSTOCK_INLINE Ints widen_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PENSTOCK_INLINE Ints widen_u16(const void* p) { return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))}; }
PENSTOCK_INLINE Floats load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(shift_left(widen_u16(p), 16).v)}; }
PENSTOCK_INLINE Ints lane_numbers() {
  return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
// Reads four words of each lane: words[i] of lane r is at `at + offsets[r]`, i words further.
PENSTOCK_INLINE void load_words(const uint8_t* at, const ptrdiff_t (&offsets)[16], Ints (&words)[4]) {
  const auto part = [&](int lane) { return _mm_loadu_si128((const __m128i*)(at + offsets[lane])); };
  __m512i rows[4];  // the words of lanes i, i + 4, i + 8 and i + 12
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(i + 4), 1);
    rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], part(i + 8), 2), part(i + 12), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i c = _mm512_unpackhi_epi32(rows[0], rows[1]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  words[0] = {_mm512_unpacklo_epi64(a, b)};
  words[1] = {_mm512_unpackhi_epi64(a, b)};
  words[2] = {_mm512_unpacklo_epi64(c, d)};
  words[3] = {_mm512_unpackhi_epi64(c, d)};
}
// The numbers that have these bits.
PENSTOCK_INLINE Floats of_bits(Ints x) { return {_mm512_castsi512_ps(x.v)}; }
PENSTOCK_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
PENSTOCK_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// The bits of |x|.
PENSTOCK_INLINE Ints magnitude(Floats a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
PENSTOCK_INLINE Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
PENSTOCK_INLINE int32_t largest(Ints a) { return _mm512_reduce_max_epi32(a.v); }
PENSTOCK_INLINE int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
PENSTOCK_INLINE void store_s8(int8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }
PENSTOCK_INLINE void store_u8(uint8_t* p, Ints a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(a.v)); }

PENSTOCK_INLINE Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
PENSTOCK_INLINE void store_bytes(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
PENSTOCK_INLINE Bytes broadcast_word(uint32_t x) { return {_mm512_set1_epi32((int)x)}; }
// Shifts the 32-bit words left by Shift; a negative one goes right.
template <int Shift>
PENSTOCK_INLINE __m512i shifted(__m512i a) {
  if constexpr (Shift == 0) return a;
  return Shift < 0 ? _mm512_srli_epi32(a, Shift < 0 ? -Shift : 0) : _mm512_slli_epi32(a, Shift < 0 ? 0 : Shift);
}
// bits & mask per byte, after a left shift of the 32-bit words of `bits` by Shift; a negative one goes right.
template <int Shift>
PENSTOCK_INLINE Bytes moved_bits(Bytes bits, uint8_t mask) {
  return {_mm512_and_si512(shifted<Shift>(bits.v), _mm512_set1_epi8((char)mask))};
}
// a | moved_bits<Shift>(bits, mask).
template <int Shift>
PENSTOCK_INLINE Bytes with_bits(Bytes a, Bytes bits, uint8_t mask) {
  return {_mm512_ternarylogic_epi32(a.v, shifted<Shift>(bits.v), _mm512_set1_epi8((char)mask), 0xf8)};
}
// Replaces each byte, which is below 16, by that one of the table.
PENSTOCK_INLINE Bytes looked_up(const uint8_t (&table)[16], Bytes a) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(all, a.v)};
}
// acc + a0 * b0 + a1 * b1 per lane.
#ifdef PENSTOCK_BF16
PENSTOCK_INLINE Floats dot_bf16(Floats acc, Bytes a, Bytes b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}
#else
PENSTOCK_INLINE Floats dot_bf16(Floats acc, Bytes a, Bytes b) {
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  const __m512 even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16)),
                                      _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16)), acc.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a.v, high)),
                          _mm512_castsi512_ps(_mm512_and_si512(b.v, high)), even)};
}
#endif
// acc + the four products of unsigned with signed bytes per lane. In assembly, because GCC 12 spills accumulators
// around the intrinsic.
PENSTOCK_INLINE Ints dot_u8s8(Ints acc, Bytes unsigned_bytes, Bytes signed_bytes) {
  asm("vpdpbusd %2,%1,%0" : "+v"(acc.v) : "v"(unsigned_bytes.v), "v"(signed_bytes.v));
  return acc;
}

// Four signed bytes in every lane, stored as they are.
using Factors = Bytes;
// 32-bit words of four stored factors.
constexpr int kFactorWords = 1;
PENSTOCK_INLINE void store_factors(uint32_t* p, Ints x) { store_s8(reinterpret_cast<int8_t*>(p), x); }
PENSTOCK_INLINE Factors load_factors(const uint32_t* p) { return broadcast_word(*p); }
// acc + the four products of unsigned bytes with factors per lane.
PENSTOCK_INLINE Ints dot_u8(Ints acc, Bytes unsigned_bytes, Factors x) { return dot_u8s8(acc, unsigned_bytes, x); }
// Sums in 16 bits, which are not needed here.
template <int Most>
struct ShortSums {
  static constexpr int kWords = 0;
};

PENSTOCK_INLINE Mask less(Ints a, Ints b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
PENSTOCK_INLINE Mask greater(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
PENSTOCK_INLINE Mask at_least(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
PENSTOCK_INLINE Mask equal(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PENSTOCK_INLINE Floats select(Mask m, Floats yes, Floats no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
PENSTOCK_INLINE uint32_t bits(Mask m) { return m.v; }

// Sums and differences of lanes at distance H: lane i becomes x[i] + x[i + H] if bit H of i is clear, and x[i - H] -
// x[i] if it is set.
template <int H>
PENSTOCK_INLINE Floats butterfly(Floats x) {
  __m512 other;
  if constexpr (H == 1) other = _mm512_permute_ps(x.v, 0xb1);
  if constexpr (H == 2) other = _mm512_permute_ps(x.v, 0x4e);
  if constexpr (H == 4) other = _mm512_shuffle_f32x4(x.v, x.v, 0xb1);
  if constexpr (H == 8) other = _mm512_shuffle_f32x4(x.v, x.v, 0x4e);
  constexpr __mmask16 kSecond = H == 1 ? 0xaaaa : H == 2 ? 0xcccc : H == 4 ? 0xf0f0 : 0xff00;
  const __m512 signs = _mm512_mask_blend_ps(kSecond, _mm512_set1_ps(1.f), _mm512_set1_ps(-1.f));
  return {_mm512_fmadd_ps(x.v, signs, other)};
}

// Lane i is the reduction of all lanes of x[i]. Halves are combined until each quarter holds four of them, then
// quarters are combined across. Lanes from N on repeat others.
template <int N, class Op>
PENSTOCK_INLINE __m512 reduce_each(const __m512 (&x)[N], const Op& op) {
  constexpr int kPairs = (N + 1) / 2, kQuads = (kPairs + 1) / 2;
  __m512 pairs[kPairs], quads[kQuads];
  for (int i = 0; i < kPairs; ++i) {
    const __m512 a = x[2 * i], b = x[2 * i + 1 < N ? 2 * i + 1 : 2 * i];
    pairs[i] = op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < kQuads; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]);
    const __m512d b = _mm512_castps_pd(pairs[2 * i + 1 < kPairs ? 2 * i + 1 : 2 * i]);
    quads[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto across = [&](__m512 a, __m512 b) {
    return op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 low = across(quads[0], quads[kQuads > 1]);
  const __m512 high = kQuads > 2 ? across(quads[kQuads > 2 ? 2 : 0], quads[kQuads - 1]) : low;
  return op(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
template <int N>
PENSTOCK_INLINE Floats largest_of_each(const Floats (&x)[N]) {
  __m512 lanes[N];
  for (int i = 0; i < N; ++i) lanes[i] = x[i].v;
  return {reduce_each(lanes, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })};
}
PENSTOCK_INLINE Ints sum_of_each(const Ints (&x)[16]) {
  __m512 lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = _mm512_castsi512_ps(x[i].v);
  return {_mm512_castps_si512(reduce_each(lanes, [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }))};
}

}  // namespace penstock
