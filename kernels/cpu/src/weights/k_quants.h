// GGUF's formats with blocks of 256 weights, the k-quants, and their panels.
//
// A block has one float16, which scales the small integer scales of its groups, and in q4_k and q5_k a second one for
// the groups' minima. A group is 32 weights with a scale and a minimum of 6 bits each (q4_k, q5_k):
//   w = scale * group_scale * q - minimum * group_minimum
// or 16 weights with a scale of 8 bits (q6_k): w = scale * group_scale * (q - 32).
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
//
// A panel keeps the numbers of 32 rows in the order in which the kernels read them, and no byte more than the blocks.
// Per 256 columns it holds:
//   q4_k   32 f16 scales, 32 f16 minima, group scales and minima (see KScales), 8 groups
//   q5_k   the same; before the nibbles of a group come its fifth bits
//   q6_k   32 f16 scales, [16][32 rows] s8 group scales, 8 groups; before the nibbles of a group come its bit pairs
// A group is 32 columns:
//   nibbles     [4][32 rows][4] pairs: column c in the low half of a byte, column c + 4 in the high half
//   fifth bits  [32 rows] words: bit 8 b + k belongs to column 4 k + b
//   bit pairs   [2][32 rows] words: bits 8 b + 2 k and the next one of word j belong to column 16 j + 4 k + b
#pragma once
#include "simd/simd.h"

namespace penstock {

constexpr int kKBlock = 256;
constexpr int kKGroups = 8;  // groups of 32 columns in a block
constexpr int kKPanel = 32;  // rows of a panel
constexpr int kNibbleBytes = kKPanel * 16;

// Group scales and minima of q4_k and q5_k, 6 bits each.
//   [8][32 rows]  the low 4 bits of the scale, and above them those of the minimum
//   [4][32 rows]  the high 2 bits: bits 4 and 5 of the scale of group g at their places, those of its minimum above
//                 them; and below, in the same order, those of group g + 4
struct KScales {
  static constexpr int kLow = 2 * kKPanel * sizeof(f16);
  static constexpr int kHigh = kLow + kKGroups * kKPanel;
  static constexpr int kEnd = kHigh + kKGroups / 2 * kKPanel;
};

struct Q4_KPanel {
  static constexpr int kFirstGroup = KScales::kEnd;
  static constexpr int kExtraBytes = 0;  // of a group, before its nibbles
  static constexpr int kGroupBytes = kExtraBytes + kNibbleBytes;
  static constexpr int kBytes = kFirstGroup + kKGroups * kGroupBytes;
};
struct Q5_KPanel {
  static constexpr int kFirstGroup = KScales::kEnd;
  static constexpr int kExtraBytes = kKPanel * 4;
  static constexpr int kGroupBytes = kExtraBytes + kNibbleBytes;
  static constexpr int kBytes = kFirstGroup + kKGroups * kGroupBytes;
};
struct Q6_KPanel {
  static constexpr int kScales = kKPanel * sizeof(f16);
  static constexpr int kFirstGroup = kScales + 2 * kKGroups * kKPanel;
  static constexpr int kExtraBytes = 2 * kKPanel * 4;
  static constexpr int kGroupBytes = kExtraBytes + kNibbleBytes;
  static constexpr int kBytes = kFirstGroup + kKGroups * kGroupBytes;
};

// Convert blocks to floats.
void widen_q4_k(const uint8_t* blocks, int num_blocks, float* out);
void widen_q5_k(const uint8_t* blocks, int num_blocks, float* out);
void widen_q6_k(const uint8_t* blocks, int num_blocks, float* out);

// Put the blocks of a row into lane `lane` of a panel of zeros.
void put_q4_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane);
void put_q5_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane);
void put_q6_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane);

// Read a row back from a panel, as floats.
void get_q4_k(const uint8_t* panel, int lane, int num_blocks, float* out);
void get_q5_k(const uint8_t* panel, int lane, int num_blocks, float* out);
void get_q6_k(const uint8_t* panel, int lane, int num_blocks, float* out);

}  // namespace penstock
