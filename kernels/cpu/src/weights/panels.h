// Panels of 32 rows for GGUF's formats: the numbers of the blocks, in the order in which the kernels read them.
//
// A panel has no byte more than the blocks. For each block of columns it begins with 32 scales, f16 but in mxfp4. Then come 32 f16
// minima, if the format has them, and the small scales of the groups or of their halves: see the classes below whose
// names have Scales. At the end are the codes of each group of 32 columns: see CodeBits.
#pragma once
#include "weights/gguf_blocks.h"

namespace penstock {

constexpr int kPanel = 32;  // rows
constexpr int kGroup = 32;  // columns

// The codes of a group of columns: first their high bits, then their low ones.
//   1 high bit: [32 rows] words. Bit 8 b + k belongs to column 4 k + b.
//   2 high bits: [2][32 rows] words. Bits 8 b + 2 k and the next one of word j: column 16 j + 4 k + b. So are 2 low bits.
//   4 low bits: [4][32 rows][4] bytes. Column c is in the low half of a byte, column c + 4 in the high half.
//   8 low bits: [8][32 rows][4] bytes.
template <int kLowBits, int kHighBits>
struct CodeBits {
  static constexpr int kLow = kLowBits;
  static constexpr int kHigh = kHighBits;
  static constexpr int kHighBytes = kHighBits * kPanel * 4;
  static constexpr int kBytes = kHighBytes + kLowBits * kPanel * 4;
  static constexpr int kWordsOfLow = 8 / kLowBits;  // words of four columns that share a word of low bits
  static constexpr int kWordsOfHigh = kHighBits ? 8 / kHighBits : 0;

  // Writes the codes of row `lane`, or of sixteen rows from it on.
  template <class Rows>
  PENSTOCK_INLINE void put(const CodesOf<Rows>& codes, uint8_t* at, int lane) {
    for (int i = 0; i < kLowBits; ++i) {
      auto low = codes.words[i * kWordsOfLow] & kLowMask;
      for (int k = 1; k < kWordsOfLow; ++k) {
        low = low | (codes.words[i * kWordsOfLow + k] & kLowMask) << k * kLowBits;
      }
      store_word(at + kHighBytes + (i * kPanel + lane) * 4, low);
    }
    for (int i = 0; i < kHighBits; ++i) {
      auto high = codes.words[i * kWordsOfHigh] >> kLowBits & kHighMask;
      for (int k = 1; k < kWordsOfHigh; ++k) {
        high = high | (codes.words[i * kWordsOfHigh + k] >> kLowBits & kHighMask) << k * kHighBits;
      }
      store_word(at + (i * kPanel + lane) * 4, high);
    }
  }

  // Reads them back.
  static Codes take(const uint8_t* at, int lane) {
    Codes codes;
    for (int i = 0; i < 8; ++i) {
      codes.words[i] = word_at(at + kHighBytes, i / kWordsOfLow, lane) >> i % kWordsOfLow * kLowBits & kLowMask;
      if constexpr (kHighBits > 0) {
        const uint32_t high = word_at(at, i / kWordsOfHigh, lane) >> i % kWordsOfHigh * kHighBits & kHighMask;
        codes.words[i] |= high << kLowBits;
      }
    }
    return codes;
  }

  // Returns four columns of 16 rows, shifted left by kShift. at: the line of these rows, with 64 bytes for 16 rows.
  template <int Word, int kShift>
  PENSTOCK_INLINE Bytes word(const uint8_t* at) {
    constexpr int kMask = ((1 << kLowBits) - 1) << kShift, kFrom = Word % kWordsOfLow * kLowBits;
    const Bytes low = load_bytes(at + kHighBytes + Word / kWordsOfLow * kPanel * 4);
    if constexpr (kLowBits == 8) return low;
    const Bytes codes = moved_bits<kShift - kFrom>(low, kMask);
    if constexpr (kHighBits == 0) {
      return codes;
    } else {
      constexpr int kTo = kShift + kLowBits, kHighFrom = Word % kWordsOfHigh * kHighBits;
      const Bytes high = load_bytes(at + Word / kWordsOfHigh * kPanel * 4);
      return with_bits<kTo - kHighFrom>(codes, high, ((1 << kHighBits) - 1) << kTo);
    }
  }

 private:
  static constexpr uint32_t kLowMask = in_every_byte((1 << kLowBits) - 1);
  static constexpr uint32_t kHighMask = in_every_byte((1 << kHighBits) - 1);

  static uint32_t word_at(const uint8_t* at, int i, int lane) {
    return reinterpret_cast<const uint32_t*>(at)[i * kPanel + lane];
  }
};

PENSTOCK_INLINE f16& half_at(uint8_t* at, int i) { return reinterpret_cast<f16*>(at)[i]; }
PENSTOCK_INLINE Floats halves_at(const uint8_t* at, int row) {
  return load_f16(reinterpret_cast<const f16*>(at) + row);
}

// The scales of a block. `scale` and `minimum` return those of 16 rows from `row` on, for part `part` of group `group`.
//   w = scale * (code - zero) - minimum
struct PlainScales {
  static constexpr int kGroups = 1, kParts = 1, kBytes = kPanel * 2;
  static constexpr bool kHasMinima = false;

  template <class Block>
  static void put(const Block& block, uint8_t* at, int lane) {
    half_at(at, lane) = block.scale;
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int, int, int row) { return halves_at(at, row); }
};

// Powers of two. A scale is half of its power, because the table has the doubled weights.
struct PowerScales {
  static constexpr int kGroups = 1, kParts = 1, kBytes = kPanel;
  static constexpr bool kHasMinima = false;

  static void put(const MXFP4Block& block, uint8_t* at, int lane) { at[lane] = block.scale; }
  // 255 stands for NaN, which infinity makes of sums. The smallest power, of 0, is a number without leading bit.
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int, int, int row) {
    const Ints bits = max(shift_left(widen_u8(at + row), 23), broadcast_int(1 << 22));
    return of_bits(bits) * broadcast(0.5f);
  }
};

struct PlainScalesAndMinima {
  static constexpr int kGroups = 1, kParts = 1, kBytes = 2 * kPanel * 2;
  static constexpr bool kHasMinima = true;

  template <class Block>
  static void put(const Block& block, uint8_t* at, int lane) {
    half_at(at, lane) = block.scale;
    half_at(at, kPanel + lane) = block.minimum;
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int, int, int row) { return halves_at(at, row); }
  // GGUF adds these minima.
  PENSTOCK_INLINE Floats minimum(const uint8_t* at, int, int, int row) { return zeros() - halves_at(at, kPanel + row); }
};

// Pairs of 6-bit numbers for eight groups, in 12 bytes of each row.
//   [8][32 rows] bytes: the low 4 bits of the first number, and above them those of the second.
//   [4][32 rows] bytes. The upper half of byte g has the high 2 bits of group g: those of the first number, and above
//   them those of the second. The lower half has those of group g + 4.
struct PairsOf6 {
  static constexpr int kBytes = 12 * kPanel;
  static constexpr int kHigh = 8 * kPanel;

  // Writes the pairs of all groups.
  static void put(const Pairs6& pairs, uint8_t* at, int lane) {
    // Four groups at once, one in each byte of a word.
    uint32_t firsts, seconds, low;
    std::memcpy(&firsts, pairs.bytes, 4);
    std::memcpy(&seconds, pairs.bytes + 4, 4);
    std::memcpy(&low, pairs.bytes + 8, 4);
    put_bytes((firsts & in_every_byte(15)) | (seconds & in_every_byte(15)) << 4, at, lane);
    put_bytes(low, at + 4 * kPanel, lane);
    const uint32_t upper = (firsts & in_every_byte(48)) | (seconds & in_every_byte(48)) << 2;
    const uint32_t lower = (firsts >> 6 & in_every_byte(3)) | (seconds >> 4 & in_every_byte(12));
    put_bytes(upper | lower, at + kHigh, lane);
  }
  // Writes byte i of a word to row `lane` of line i.
  static void put_bytes(uint32_t word, uint8_t* at, int lane) {
    for (int i = 0; i < 4; ++i) at[i * kPanel + lane] = word >> i * 8;
  }
  PENSTOCK_INLINE Ints high(const uint8_t* at, int group, int row) {
    return shift_left(widen_u8(at + kHigh + group % 4 * kPanel + row), group < 4 ? 0 : 4);
  }
  PENSTOCK_INLINE Ints first(const uint8_t* at, int group, int row) {
    const Ints low = widen_u8(at + group * kPanel + row);
    return (low & broadcast_int(15)) | (high(at, group, row) & broadcast_int(48));
  }
  PENSTOCK_INLINE Ints second(const uint8_t* at, int group, int row) {
    const Ints low = widen_u8(at + group * kPanel + row);
    return shift_right(low, 4) | (shift_right(high(at, group, row), 2) & broadcast_int(48));
  }
};

// Scale and minimum of each group: PairsOf6.
struct GroupScalesAndMinima {
  static constexpr int kGroups = 8, kParts = 1, kPairs = 2 * kPanel * 2, kBytes = kPairs + PairsOf6::kBytes;
  static constexpr bool kHasMinima = true;

  template <class Block>
  static void put(const Block& block, uint8_t* at, int lane) {
    PlainScalesAndMinima::put(block, at, lane);
    PairsOf6::put(block.groups, at + kPairs, lane);
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int group, int, int row) {
    return halves_at(at, row) * to_floats(PairsOf6::first(at + kPairs, group, row));
  }
  PENSTOCK_INLINE Floats minimum(const uint8_t* at, int group, int, int row) {
    return halves_at(at, kPanel + row) * to_floats(PairsOf6::second(at + kPairs, group, row));
  }
};

// 32 + the scales of the two halves of each group: PairsOf6.
struct HalfScales6 {
  static constexpr int kGroups = 8, kParts = 2, kPairs = kPanel * 2, kBytes = kPairs + PairsOf6::kBytes;
  static constexpr bool kHasMinima = false;

  static void put(const Q3_KBlock& block, uint8_t* at, int lane) {
    PlainScales::put(block, at, lane);
    uint32_t words[3];
    std::memcpy(words, block.scales, sizeof words);
    for (int i = 0; i < 2; ++i) {
      // The even bytes are those of groups 2 i and 2 i + 1, or of the groups four later.
      const uint32_t low = words[i] & in_every_byte(15), later = words[i] >> 4 & in_every_byte(15);
      const uint32_t bits = words[2] >> 2 * i & in_every_byte(0x33), high = bits | bits >> 6;
      uint8_t* line = at + kPairs + 2 * i * kPanel;
      put_even_bytes(low | low >> 4, line, lane);
      put_even_bytes(later | later >> 4, line + 4 * kPanel, lane);
      put_even_bytes((high << 4 & in_every_byte(0xf0)) | (high >> 4 & in_every_byte(15)), line + PairsOf6::kHigh, lane);
    }
  }
  static void put_even_bytes(uint32_t word, uint8_t* at, int lane) {
    for (int i = 0; i < 2; ++i) at[i * kPanel + lane] = word >> i * 16;
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int group, int part, int row) {
    const uint8_t* pairs = at + kPairs;
    const Ints scale = part == 0 ? PairsOf6::first(pairs, group, row) : PairsOf6::second(pairs, group, row);
    return halves_at(at, row) * to_floats(scale + broadcast_int(-32));
  }
};

// The scales of the two halves of each group: [16][32 rows] signed bytes.
struct HalfScales8 {
  static constexpr int kGroups = 8, kParts = 2, kScales = kPanel * 2, kBytes = kScales + 16 * kPanel;
  static constexpr bool kHasMinima = false;

  static void put(const Q6_KBlock& block, uint8_t* at, int lane) {
    PlainScales::put(block, at, lane);
    for (int s = 0; s < 16; ++s) at[kScales + s * kPanel + lane] = block.scales[s];
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int group, int part, int row) {
    return halves_at(at, row) * to_floats(widen_s8(at + kScales + (2 * group + part) * kPanel + row));
  }
};

// The scales and minima of the two halves of each group: [16][32 rows] bytes, with the scale in the low half.
struct HalfScalesAndMinima {
  static constexpr int kGroups = 8, kParts = 2, kPairs = 2 * kPanel * 2, kBytes = kPairs + 16 * kPanel;
  static constexpr bool kHasMinima = true;

  static void put(const Q2_KBlock& block, uint8_t* at, int lane) {
    PlainScalesAndMinima::put(block, at, lane);
    for (int s = 0; s < 16; ++s) at[kPairs + s * kPanel + lane] = block.scales[s];
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int group, int part, int row) {
    return halves_at(at, row) * to_floats(pairs(at, group, part, row) & broadcast_int(15));
  }
  PENSTOCK_INLINE Floats minimum(const uint8_t* at, int group, int part, int row) {
    return halves_at(at, kPanel + row) * to_floats(shift_right(pairs(at, group, part, row), 4));
  }

 private:
  PENSTOCK_INLINE Ints pairs(const uint8_t* at, int group, int part, int row) {
    return widen_u8(at + kPairs + (2 * group + part) * kPanel + row);
  }
};

// 32 + the scale of each group. [32 rows][2] bytes with the high two bits of each, then [4][32 rows] bytes with the low
// four bits of two groups.
struct GroupScales6 {
  static constexpr int kGroups = 8, kParts = 1, kHigh = kPanel * 2, kLow = kHigh + kPanel * 2;
  static constexpr int kBytes = kLow + 4 * kPanel;
  static constexpr bool kHasMinima = false;

  static void put(const IQ4_XSBlock& block, uint8_t* at, int lane) {
    PlainScales::put(block, at, lane);
    std::memcpy(&half_at(at + kHigh, lane), block.high_scales, sizeof block.high_scales);
    for (int i = 0; i < 4; ++i) at[kLow + i * kPanel + lane] = block.low_scales[i];
  }
  PENSTOCK_INLINE Floats scale(const uint8_t* at, int group, int, int row) {
    const Ints low = shift_right(widen_u8(at + kLow + group / 2 * kPanel + row), group % 2 * 4);
    const Ints high = shift_right(widen_u16(at + kHigh + row * 2), 2 * group);
    const Ints scale = (low & broadcast_int(15)) | shift_left(high & broadcast_int(3), 4);
    return halves_at(at, row) * to_floats(scale + broadcast_int(-32));
  }
};

// The weights of iq4_nl and iq4_xs by their codes, and the same plus 128.
inline constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) inline constexpr uint8_t kRaisedTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                         129, 141, 153, 166, 181, 197, 217, 241};
// The same of mxfp4: twice the numbers of one sign, two exponent and one fraction bit.
inline constexpr int8_t kFp4Table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) inline constexpr uint8_t kRaisedFp4Table[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                            128, 127, 126, 125, 124, 122, 120, 116};
constexpr int kFromTable = -1, kFromFp4Table = -2;

// A panel. kZero: the code that means zero, or the table that has the weights.
template <class Block_, class Scales_, class Bits_, int kZero_>
struct Panel {
  using Block = Block_;
  using Scales = Scales_;
  using Bits = Bits_;
  static constexpr int kZero = kZero_;
  static constexpr int kColumns = Scales::kGroups * kGroup;  // of a block
  static constexpr int kBytes = Scales::kBytes + Scales::kGroups * Bits::kBytes;
  static_assert(kBytes == kPanel * sizeof(Block));

  static constexpr bool kHasTable = kZero < 0;

  static int value(int code) {
    if constexpr (kHasTable) return (kZero == kFromTable ? kTable : kFp4Table)[code];
    return code - kZero;
  }
  static constexpr const uint8_t (&raised_table())[16] {
    if constexpr (kZero == kFromTable) {
      return kRaisedTable;
    } else {
      return kRaisedFp4Table;
    }
  }
  static constexpr int group_at(int group) { return Scales::kBytes + group * Bits::kBytes; }
};

using Q8_0Panel = Panel<Q8_0Block, PlainScales, CodeBits<8, 0>, 128>;
using Q4_0Panel = Panel<Q4_0Block, PlainScales, CodeBits<4, 0>, 8>;
using Q4_1Panel = Panel<Q4_1Block, PlainScalesAndMinima, CodeBits<4, 0>, 0>;
using Q5_0Panel = Panel<Q5_0Block, PlainScales, CodeBits<4, 1>, 16>;
using Q5_1Panel = Panel<Q5_1Block, PlainScalesAndMinima, CodeBits<4, 1>, 0>;
using Q2_KPanel = Panel<Q2_KBlock, HalfScalesAndMinima, CodeBits<2, 0>, 0>;
using Q3_KPanel = Panel<Q3_KBlock, HalfScales6, CodeBits<2, 1>, 4>;
using Q4_KPanel = Panel<Q4_KBlock, GroupScalesAndMinima, CodeBits<4, 0>, 0>;
using Q5_KPanel = Panel<Q5_KBlock, GroupScalesAndMinima, CodeBits<4, 1>, 0>;
using Q6_KPanel = Panel<Q6_KBlock, HalfScales8, CodeBits<4, 2>, 32>;
using IQ4_NLPanel = Panel<IQ4_NLBlock, PlainScales, CodeBits<4, 0>, kFromTable>;
using MXFP4Panel = Panel<MXFP4Block, PowerScales, CodeBits<4, 0>, kFromFp4Table>;
using IQ4_XSPanel = Panel<IQ4_XSBlock, GroupScales6, CodeBits<4, 0>, kFromTable>;

}  // namespace penstock
