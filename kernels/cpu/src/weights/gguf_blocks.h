// GGUF's blocks of quantized weights, as files have them.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
//
// A weight has a code of 2 to 8 bits. A group is 32 weights. A block has one group, or eight in the k-quants and iq4_xs.
#pragma once
#include "simd/simd.h"

namespace penstock {

// The codes of a group, one byte each, in the order of the columns.
struct Codes {
  uint32_t words[8];

  uint8_t operator[](int i) const { return words[i / 4] >> i % 4 * 8; }
};

constexpr uint32_t in_every_byte(uint8_t value) { return value * 0x01010101u; }

// Returns (byte >> shift) & mask of 32 bytes.
PENSTOCK_INLINE Codes bits_of(const uint8_t* bytes, int shift, uint8_t mask) {
  Codes codes;
  std::memcpy(codes.words, bytes, sizeof codes.words);
  for (uint32_t& word : codes.words) word = word >> shift & in_every_byte(mask);
  return codes;
}

// Returns the low halves of 16 bytes, then the high ones.
PENSTOCK_INLINE Codes nibbles_of(const uint8_t* bytes) {
  Codes codes;
  std::memcpy(codes.words, bytes, 16);
  for (int i = 0; i < 4; ++i) {
    codes.words[4 + i] = codes.words[i] >> 4 & in_every_byte(15);
    codes.words[i] &= in_every_byte(15);
  }
  return codes;
}

// Returns bit i of 32 bits as code i.
PENSTOCK_INLINE Codes single_bits(const uint8_t* bytes) {
  Codes codes;
  for (int i = 0; i < 8; ++i) {
    // Byte k keeps bit k, and the sum carries it to the top of the byte.
    const uint32_t bits = in_every_byte(bytes[i / 2] >> i % 2 * 4) & 0x08040201u;
    codes.words[i] = (bits + in_every_byte(127)) >> 7 & in_every_byte(1);
  }
  return codes;
}

PENSTOCK_INLINE Codes with_high_bits(Codes low, const Codes& high, int shift) {
  for (int i = 0; i < 8; ++i) low.words[i] |= high.words[i] << shift;
  return low;
}

struct Q4_0Block {
  f16 scale;
  uint8_t nibbles[16];

  Codes codes(int) const { return nibbles_of(nibbles); }
};
using IQ4_NLBlock = Q4_0Block;
struct Q4_1Block {
  f16 scale, minimum;
  uint8_t nibbles[16];

  Codes codes(int) const { return nibbles_of(nibbles); }
};
struct Q5_0Block {
  f16 scale;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  Codes codes(int) const { return with_high_bits(nibbles_of(nibbles), single_bits(fifth_bits), 4); }
};
struct Q5_1Block {
  f16 scale, minimum;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  Codes codes(int) const { return with_high_bits(nibbles_of(nibbles), single_bits(fifth_bits), 4); }
};
struct Q8_0Block {
  f16 scale;
  int8_t values[32];

  // 128 + value.
  Codes codes(int) const {
    Codes codes = bits_of(reinterpret_cast<const uint8_t*>(values), 0, 255);
    for (uint32_t& word : codes.words) word ^= in_every_byte(128);
    return codes;
  }
};

// Pairs of 6-bit numbers of eight groups. Those of the first four groups are in the low bits of bytes 0 to 3 and 4 to 7.
// The other four have their low 4 bits in bytes 8 to 11, and their high 2 bits above those of bytes 0 to 7.
struct Pairs6 {
  uint8_t bytes[12];

  int first(int group) const {
    return group < 4 ? bytes[group] & 63 : (bytes[group + 4] & 15) | (bytes[group - 4] >> 6 << 4);
  }
  int second(int group) const {
    return group < 4 ? bytes[group + 4] & 63 : (bytes[group + 4] >> 4) | (bytes[group] >> 6 << 4);
  }
};

struct Q2_KBlock {
  uint8_t scales[16];  // of 16 weights: the scale in the low half, the minimum in the high one
  uint8_t crumbs[64];
  f16 scale, minimum;

  Codes codes(int group) const { return bits_of(crumbs + group / 4 * 32, group % 4 * 2, 3); }
};
struct Q3_KBlock {
  uint8_t high_bits[32];
  uint8_t crumbs[64];
  uint8_t scales[12];
  f16 scale;

  Codes codes(int group) const {
    return with_high_bits(bits_of(crumbs + group / 4 * 32, group % 4 * 2, 3), bits_of(high_bits, group, 1), 2);
  }
  // 32 + the scale of 16 weights. Its low 4 bits are in bytes 0 to 7, its high 2 bits in bytes 8 to 11.
  int scale_of(int half) const {
    return (scales[half % 8] >> half / 8 * 4 & 15) | (scales[8 + half % 4] >> half / 4 * 2 & 3) << 4;
  }
};
struct Q4_KBlock {
  f16 scale, minimum;
  Pairs6 groups;
  uint8_t nibbles[128];

  // Two groups share 32 bytes.
  Codes codes(int group) const { return bits_of(nibbles + group / 2 * 32, group % 2 * 4, 15); }
};
struct Q5_KBlock {
  f16 scale, minimum;
  Pairs6 groups;
  uint8_t high_bits[32];
  uint8_t nibbles[128];

  Codes codes(int group) const {
    return with_high_bits(bits_of(nibbles + group / 2 * 32, group % 2 * 4, 15), bits_of(high_bits, group, 1), 4);
  }
};
struct Q6_KBlock {
  uint8_t nibbles[128];
  uint8_t pairs[64];
  int8_t scales[16];
  f16 scale;

  // Each half of a block has four groups. Their low 4 bits are in 64 bytes: first all low nibbles, then all high ones.
  // Their high 2 bits are in 32 bytes.
  Codes codes(int group) const {
    const int half = group / 4, place = group % 4;
    const Codes low = bits_of(nibbles + half * 64 + place % 2 * 32, place / 2 * 4, 15);
    return with_high_bits(low, bits_of(pairs + half * 32, place * 2, 3), 4);
  }
};
struct IQ4_XSBlock {
  f16 scale;
  uint8_t high_scales[2];  // two bits of each group
  uint8_t low_scales[4];   // four bits of each group
  uint8_t nibbles[128];

  Codes codes(int group) const { return nibbles_of(nibbles + group * 16); }
};

static_assert(sizeof(Q4_0Block) == 18 && sizeof(Q4_1Block) == 20 && sizeof(Q5_0Block) == 22 && sizeof(Q5_1Block) == 24);
static_assert(sizeof(Q8_0Block) == 34 && sizeof(Q2_KBlock) == 84 && sizeof(Q3_KBlock) == 110);
static_assert(sizeof(Q4_KBlock) == 144 && sizeof(Q5_KBlock) == 176 && sizeof(Q6_KBlock) == 210);
static_assert(sizeof(IQ4_XSBlock) == 136);

}  // namespace penstock
