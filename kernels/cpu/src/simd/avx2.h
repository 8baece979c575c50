// Sixteen lanes in two AVX2 registers: the same operations as avx512.h, for CPUs without AVX-512.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace penstock {

constexpr const char* kIsa = "avx2";

// Vectors of sixteen lanes that fit into the registers.
constexpr int kRegisters = 8;

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
// 64 bytes as an operand of a dot product: sixteen pairs of bf16 or sixteen groups of four bytes.
struct Bytes {
  __m256i a, b;
};
struct Mask {
  __m256 a, b;
};

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

PENSTOCK_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PENSTOCK_INLINE Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PENSTOCK_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PENSTOCK_INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PENSTOCK_INLINE Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PENSTOCK_INLINE Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PENSTOCK_INLINE Floats abs(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
PENSTOCK_INLINE Floats round(Floats x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
PENSTOCK_INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// x * 2^n for integral n in [-126, 127].
PENSTOCK_INLINE Floats scale_by_power(Floats x, Floats n) {
  return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
PENSTOCK_INLINE float sum(Floats x) {
  const __m256 pair = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(pair), _mm256_extractf128_ps(pair, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
PENSTOCK_INLINE float largest(Floats x) {
  const __m256 pair = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(pair), _mm256_extractf128_ps(pair, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

// Rounds to nearest even, in the low half of each lane; a NaN stays NaN.
PENSTOCK_INLINE __m256i narrow_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
PENSTOCK_INLINE void store_bf16(uint16_t* p, Floats x) {
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(x.a), narrow_bf16(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
PENSTOCK_INLINE Floats load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PENSTOCK_INLINE void store_f16(uint16_t* p, Floats x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

PENSTOCK_INLINE Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PENSTOCK_INLINE Ints load_ints(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
PENSTOCK_INLINE void store_ints(int32_t* p, Ints x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
PENSTOCK_INLINE Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PENSTOCK_INLINE Ints operator&(Ints x, Ints y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
PENSTOCK_INLINE Ints operator|(Ints x, Ints y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
PENSTOCK_INLINE Ints operator^(Ints x, Ints y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
PENSTOCK_INLINE Ints shift_left(Ints x, int bits) {
  return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
PENSTOCK_INLINE Ints shift_right(Ints x, int bits) {
  return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
PENSTOCK_INLINE Ints widen_s8(const void* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
PENSTOCK_INLINE Ints widen_u8(const void* p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
PENSTOCK_INLINE Ints widen_u16(const void* p) {
  const __m128i* words = (const __m128i*)p;
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(words)), _mm256_cvtepu16_epi32(_mm_loadu_si128(words + 1))};
}
PENSTOCK_INLINE Floats load_bf16(const uint16_t* p) {
  const Ints bits = shift_left(widen_u16(p), 16);
  return {_mm256_castsi256_ps(bits.a), _mm256_castsi256_ps(bits.b)};
}
PENSTOCK_INLINE Ints lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
// As load_words, for eight lanes.
PENSTOCK_INLINE void load_half_words(const uint8_t* at, const ptrdiff_t* offsets, __m256i (&words)[4]) {
  const auto part = [&](int lane) { return _mm_loadu_si128((const __m128i*)(at + offsets[lane])); };
  __m256i rows[4];  // the words of lanes i and i + 4
  for (int i = 0; i < 4; ++i) rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(part(i)), part(i + 4), 1);
  const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpacklo_epi32(rows[2], rows[3]);
  const __m256i c = _mm256_unpackhi_epi32(rows[0], rows[1]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
  words[0] = _mm256_unpacklo_epi64(a, b);
  words[1] = _mm256_unpackhi_epi64(a, b);
  words[2] = _mm256_unpacklo_epi64(c, d);
  words[3] = _mm256_unpackhi_epi64(c, d);
}
// Reads four words of each lane: words[i] of lane r is at `at + offsets[r]`, i words further.
PENSTOCK_INLINE void load_words(const uint8_t* at, const ptrdiff_t (&offsets)[16], Ints (&words)[4]) {
  __m256i first[4], second[4];
  load_half_words(at, offsets, first);
  load_half_words(at, offsets + 8, second);
  for (int i = 0; i < 4; ++i) words[i] = {first[i], second[i]};
}
// The numbers that have these bits.
PENSTOCK_INLINE Floats of_bits(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PENSTOCK_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PENSTOCK_INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
// The bits of |x|.
PENSTOCK_INLINE Ints magnitude(Floats x) {
  const __m256i all_but_sign = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), all_but_sign),
          _mm256_and_si256(_mm256_castps_si256(x.b), all_but_sign)};
}
PENSTOCK_INLINE Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
PENSTOCK_INLINE int32_t largest(Ints x) {
  const __m256i pair = _mm256_max_epi32(x.a, x.b);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
PENSTOCK_INLINE int32_t sum(Ints x) {
  const __m256i pair = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
// The sixteen lanes as 16-bit integers, saturated.
PENSTOCK_INLINE __m256i narrow_16(Ints x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }
PENSTOCK_INLINE void store_s8(int8_t* p, Ints x) {
  const __m256i words = narrow_16(x);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
PENSTOCK_INLINE void store_u8(uint8_t* p, Ints x) {
  const __m256i words = narrow_16(x);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

PENSTOCK_INLINE Bytes load_bytes(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
PENSTOCK_INLINE void store_bytes(void* p, Bytes x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
PENSTOCK_INLINE Bytes broadcast_word(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
// Shifts the 32-bit words left by Shift; a negative one goes right.
template <int Shift>
PENSTOCK_INLINE __m256i shifted(__m256i x) {
  if constexpr (Shift == 0) return x;
  return Shift < 0 ? _mm256_srli_epi32(x, Shift < 0 ? -Shift : 0) : _mm256_slli_epi32(x, Shift < 0 ? 0 : Shift);
}
// bits & mask per byte, after a left shift of the 32-bit words of `bits` by Shift; a negative one goes right.
template <int Shift>
PENSTOCK_INLINE Bytes moved_bits(Bytes bits, uint8_t mask) {
  const __m256i wanted = _mm256_set1_epi8((char)mask);
  return {_mm256_and_si256(shifted<Shift>(bits.a), wanted), _mm256_and_si256(shifted<Shift>(bits.b), wanted)};
}
// a | moved_bits<Shift>(bits, mask).
template <int Shift>
PENSTOCK_INLINE Bytes with_bits(Bytes a, Bytes bits, uint8_t mask) {
  const Bytes moved = moved_bits<Shift>(bits, mask);
  return {_mm256_or_si256(a.a, moved.a), _mm256_or_si256(a.b, moved.b)};
}
// Replaces each byte, which is below 16, by that one of the table.
PENSTOCK_INLINE Bytes looked_up(const uint8_t (&table)[16], Bytes x) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(all, x.a), _mm256_shuffle_epi8(all, x.b)};
}
PENSTOCK_INLINE __m256 dot_bf16(__m256 acc, __m256i x, __m256i y) {
  const __m256i high = _mm256_set1_epi32((int)0xffff0000);
  const __m256 even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                                      _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high)),
                         even);
}
// acc + a0 * b0 + a1 * b1 per lane.
PENSTOCK_INLINE Floats dot_bf16(Floats acc, Bytes x, Bytes y) {
  return {dot_bf16(acc.a, x.a, y.a), dot_bf16(acc.b, x.b, y.b)};
}
// Four signed bytes in every lane, widened to 16-bit integers: bytes 0 and 2, and bytes 1 and 3. Activations are stored
// so: a kernel multiplies them with many vectors of weights, and would widen them for each.
struct Factors {
  __m256i even, odd;
};
// 32-bit words of four stored factors: two of 16-bit integers, and one of bytes, for ShortSums.
constexpr int kFactorWords = 3;
PENSTOCK_INLINE void store_factors(uint32_t* p, Ints x) {
  const __m256i words = narrow_16(x);
  alignas(32) uint32_t wide[8], bytes[4];
  _mm256_store_si256((__m256i*)wide, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
  const __m128i last = _mm256_extracti128_si256(words, 1);
  _mm_store_si128((__m128i*)bytes, _mm_packs_epi16(_mm256_castsi256_si128(words), last));
  for (int i = 0; i < 4; ++i, p += kFactorWords) {
    p[0] = wide[2 * i];
    p[1] = wide[2 * i + 1];
    p[2] = bytes[i];
  }
}
PENSTOCK_INLINE Factors load_factors(const uint32_t* p) {
  return {_mm256_set1_epi32((int)p[0]), _mm256_set1_epi32((int)p[1])};
}
// Multiplies 16-bit integers: the one-instruction product of bytes saturates.
PENSTOCK_INLINE __m256i dot_u8(__m256i acc, __m256i u, Factors x) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), x.even);
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), x.odd);
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// acc + the four products of unsigned bytes with factors per lane.
PENSTOCK_INLINE Ints dot_u8(Ints acc, Bytes unsigned_bytes, Factors x) {
  return {dot_u8(acc.a, unsigned_bytes.a, x), dot_u8(acc.b, unsigned_bytes.b, x)};
}
// Sums in 16 bits of products of unsigned codes up to Most with stored factors, which are at most 127. They take a third
// of the operations of dot_u8, because here the product of bytes does not saturate.
template <int Most>
struct ShortSums {
  // How many words of codes fit into a sum; a word adds two products to a lane. None: 0.
  static constexpr int kWords = 32767 / (2 * 127 * Most);
  __m256i a, b;

  PENSTOCK_INLINE ShortSums of(Bytes codes, const uint32_t* factors) {
    const __m256i x = _mm256_set1_epi32((int)factors[2]);
    return {_mm256_maddubs_epi16(codes.a, x), _mm256_maddubs_epi16(codes.b, x)};
  }
  PENSTOCK_INLINE ShortSums plus(ShortSums x, ShortSums y) {
    return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
  }
  PENSTOCK_INLINE Ints added_to(Ints acc, ShortSums x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, ones)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, ones))};
  }
};
PENSTOCK_INLINE Factors widened(__m256i s) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8), _mm256_srai_epi16(s, 8)};
}
// acc + the four products of unsigned with signed bytes per lane.
PENSTOCK_INLINE Ints dot_u8s8(Ints acc, Bytes unsigned_bytes, Bytes signed_bytes) {
  return {dot_u8(acc.a, unsigned_bytes.a, widened(signed_bytes.a)),
          dot_u8(acc.b, unsigned_bytes.b, widened(signed_bytes.b))};
}

PENSTOCK_INLINE Mask less(Ints x, Ints y) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b))};
}
PENSTOCK_INLINE Mask greater(Floats x, Floats y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
PENSTOCK_INLINE Mask at_least(Floats x, Floats y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)};
}
PENSTOCK_INLINE Mask equal(Floats x, Floats y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
PENSTOCK_INLINE Floats select(Mask m, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
PENSTOCK_INLINE uint32_t bits(Mask m) {
  return (uint32_t)_mm256_movemask_ps(m.a) | (uint32_t)_mm256_movemask_ps(m.b) << 8;
}

// Sums and differences of lanes at distance H: lane i becomes x[i] + x[i + H] if bit H of i is clear, and x[i - H] -
// x[i] if it is set.
template <int H>
PENSTOCK_INLINE __m256 half_butterfly(__m256 x) {
  __m256 other;
  if constexpr (H == 1) other = _mm256_permute_ps(x, 0xb1);
  if constexpr (H == 2) other = _mm256_permute_ps(x, 0x4e);
  if constexpr (H == 4) other = _mm256_permute2f128_ps(x, x, 1);
  constexpr int kSecond = H == 1 ? 0xaa : H == 2 ? 0xcc : 0xf0;
  return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), kSecond);
}
template <int H>
PENSTOCK_INLINE Floats butterfly(Floats x) {
  if constexpr (H == 8) {
    return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  } else {
    return {half_butterfly<H>(x.a), half_butterfly<H>(x.b)};
  }
}

// Lane i is the reduction of all lanes of x[i].
template <int N>
PENSTOCK_INLINE Floats largest_of_each(const Floats (&x)[N]) {
  float lanes[16] = {};
  for (int i = 0; i < N; ++i) lanes[i] = largest(x[i]);
  return load(lanes);
}
PENSTOCK_INLINE Ints sum_of_each(const Ints (&x)[16]) {
  int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = sum(x[i]);
  return load_ints(lanes);
}

}  // namespace penstock
