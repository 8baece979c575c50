// GGUF's blocks of quantized weights, as files have them.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
//
// A weight has a code of 2 to 8 bits. A group is 32 weights. A block has one group, or eight in the k-quants and iq4_xs.
#pragma once
#include "simd/simd.h"

namespace penstock {

// Reads words of one row's block, with a word in a uint32_t.
struct OneRow {
  using Word = uint32_t;

  PENSTOCK_INLINE void read(OneRow, const void* from, Word (&words)[4]) { std::memcpy(words, from, sizeof words); }
};

// Reads words of a block in sixteen rows, with the words of all rows in Ints. Addresses are those in the first row.
template <class Block>
class SixteenRows {
 public:
  using Word = Ints;

  // offsets: bytes from the block of the first row to that of each row.
  SixteenRows(const Block& first, const ptrdiff_t (&offsets)[kLanes]) : words_at_(byte_of(first) + kBegin) {
    for (int i = 0; i < kWords; i += 4) {
      const int begin = i < kWords - 4 ? i : kWords - 4;  // The last words may be read twice, but none past the block.
      load_words(words_at_ + begin * 4, offsets, *reinterpret_cast<Word(*)[4]>(words_ + begin));
    }
  }

  PENSTOCK_INLINE void read(const SixteenRows& rows, const void* from, Word (&words)[4]) {
    const ptrdiff_t at = (static_cast<const uint8_t*>(from) - rows.words_at_) / 4;
    for (int i = 0; i < 4; ++i) words[i] = rows.words_[at + i];
  }

 private:
  // A block is made of whole words, besides a scale of one or two bytes at its begin or its end.
  static constexpr int kBegin = offsetof(Block, scale) == 0 ? sizeof(Block) % 4 : 0;
  static constexpr int kWords = sizeof(Block) / 4;

  static const uint8_t* byte_of(const Block& block) { return reinterpret_cast<const uint8_t*>(&block); }

  const uint8_t* words_at_;
  Word words_[kWords];
};

// The codes of a group, one byte each, in the order of the columns: those of OneRow or of SixteenRows.
template <class Rows>
struct CodesOf {
  typename Rows::Word words[8];

  uint8_t operator[](int i) const { return words[i / 4] >> i % 4 * 8; }
};
using Codes = CodesOf<OneRow>;

constexpr uint32_t in_every_byte(uint8_t value) { return value * 0x01010101u; }

// Returns (byte >> shift) & mask of 32 bytes.
template <class Rows>
PENSTOCK_INLINE CodesOf<Rows> bits_of(const Rows& rows, const void* bytes, int shift, uint8_t mask) {
  typename Rows::Word first[4], second[4];
  Rows::read(rows, bytes, first);
  Rows::read(rows, static_cast<const uint8_t*>(bytes) + 16, second);
  CodesOf<Rows> codes;
  for (int i = 0; i < 4; ++i) {
    codes.words[i] = first[i] >> shift & in_every_byte(mask);
    codes.words[4 + i] = second[i] >> shift & in_every_byte(mask);
  }
  return codes;
}

// Returns the low halves of 16 bytes, then the high ones.
template <class Rows>
PENSTOCK_INLINE CodesOf<Rows> nibbles_of(const Rows& rows, const uint8_t* bytes) {
  typename Rows::Word words[4];
  Rows::read(rows, bytes, words);
  CodesOf<Rows> codes;
  for (int i = 0; i < 4; ++i) {
    codes.words[i] = words[i] & in_every_byte(15);
    codes.words[4 + i] = words[i] >> 4 & in_every_byte(15);
  }
  return codes;
}

// Returns bit i of 32 bits as code i. Reads 16 bytes.
template <class Rows>
PENSTOCK_INLINE CodesOf<Rows> single_bits(const Rows& rows, const uint8_t* bytes) {
  typename Rows::Word words[4];
  Rows::read(rows, bytes, words);
  CodesOf<Rows> codes;
  for (int i = 0; i < 8; ++i) {
    typename Rows::Word bits = words[0] >> 4 * i & 15;
    bits = bits | bits << 8;
    bits = (bits | bits << 16) & 0x08040201u;
    // Byte k keeps bit k, and the sum carries it to the top of the byte.
    codes.words[i] = (bits + in_every_byte(127)) >> 7 & in_every_byte(1);
  }
  return codes;
}

template <class Rows>
PENSTOCK_INLINE CodesOf<Rows> with_high_bits(CodesOf<Rows> low, const CodesOf<Rows>& high, int shift) {
  for (int i = 0; i < 8; ++i) low.words[i] = low.words[i] | high.words[i] << shift;
  return low;
}

struct Q4_0Block {
  f16 scale;
  uint8_t nibbles[16];

  auto codes(int, const auto& rows) const { return nibbles_of(rows, nibbles); }
};
using IQ4_NLBlock = Q4_0Block;
// OCP Microscaling's fp4 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
struct MXFP4Block {
  uint8_t scale;  // the exponent of a power of two, plus 127
  uint8_t nibbles[16];

  auto codes(int, const auto& rows) const { return nibbles_of(rows, nibbles); }
};
struct Q4_1Block {
  f16 scale, minimum;
  uint8_t nibbles[16];

  auto codes(int, const auto& rows) const { return nibbles_of(rows, nibbles); }
};
struct Q5_0Block {
  f16 scale;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  auto codes(int, const auto& rows) const {
    return with_high_bits(nibbles_of(rows, nibbles), single_bits(rows, fifth_bits), 4);
  }
};
struct Q5_1Block {
  f16 scale, minimum;
  uint8_t fifth_bits[4];
  uint8_t nibbles[16];

  auto codes(int, const auto& rows) const {
    return with_high_bits(nibbles_of(rows, nibbles), single_bits(rows, fifth_bits), 4);
  }
};
struct Q8_0Block {
  f16 scale;
  int8_t values[32];

  // 128 + value.
  auto codes(int, const auto& rows) const {
    auto codes = bits_of(rows, values, 0, 255);
    for (auto& word : codes.words) word = word ^ in_every_byte(128);
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

  auto codes(int group, const auto& rows) const { return bits_of(rows, crumbs + group / 4 * 32, group % 4 * 2, 3); }
};
struct Q3_KBlock {
  uint8_t high_bits[32];
  uint8_t crumbs[64];
  // 32 + the scales of 16 weights each. Scale i has its low 4 bits in half i / 8 of byte i % 8, and its high 2 bits in
  // quarter i / 4 of byte 8 + i % 4.
  uint8_t scales[12];
  f16 scale;

  auto codes(int group, const auto& rows) const {
    const auto low = bits_of(rows, crumbs + group / 4 * 32, group % 4 * 2, 3);
    return with_high_bits(low, bits_of(rows, high_bits, group, 1), 2);
  }
};
struct Q4_KBlock {
  f16 scale, minimum;
  Pairs6 groups;
  uint8_t nibbles[128];

  // Two groups share 32 bytes.
  auto codes(int group, const auto& rows) const { return bits_of(rows, nibbles + group / 2 * 32, group % 2 * 4, 15); }
};
struct Q5_KBlock {
  f16 scale, minimum;
  Pairs6 groups;
  uint8_t high_bits[32];
  uint8_t nibbles[128];

  auto codes(int group, const auto& rows) const {
    const auto low = bits_of(rows, nibbles + group / 2 * 32, group % 2 * 4, 15);
    return with_high_bits(low, bits_of(rows, high_bits, group, 1), 4);
  }
};
struct Q6_KBlock {
  uint8_t nibbles[128];
  uint8_t pairs[64];
  int8_t scales[16];
  f16 scale;

  // Each half of a block has four groups. Their low 4 bits are in 64 bytes: first all low nibbles, then all high ones.
  // Their high 2 bits are in 32 bytes.
  auto codes(int group, const auto& rows) const {
    const int half = group / 4, place = group % 4;
    const auto low = bits_of(rows, nibbles + half * 64 + place % 2 * 32, place / 2 * 4, 15);
    return with_high_bits(low, bits_of(rows, pairs + half * 32, place * 2, 3), 4);
  }
};
struct IQ4_XSBlock {
  f16 scale;
  uint8_t high_scales[2];  // two bits of each group
  uint8_t low_scales[4];   // four bits of each group
  uint8_t nibbles[128];

  auto codes(int group, const auto& rows) const { return nibbles_of(rows, nibbles + group * 16); }
};

static_assert(sizeof(Q4_0Block) == 18 && sizeof(Q4_1Block) == 20 && sizeof(Q5_0Block) == 22 && sizeof(Q5_1Block) == 24);
static_assert(sizeof(Q8_0Block) == 34 && sizeof(Q2_KBlock) == 84 && sizeof(Q3_KBlock) == 110);
static_assert(sizeof(Q4_KBlock) == 144 && sizeof(Q5_KBlock) == 176 && sizeof(Q6_KBlock) == 210);
static_assert(sizeof(IQ4_XSBlock) == 136 && sizeof(MXFP4Block) == 17);

}  // namespace penstock
