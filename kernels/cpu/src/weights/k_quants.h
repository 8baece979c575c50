// GGUF's formats with blocks of 256 weights, the k-quants, and their panels.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
//
// A block has one float16 that scales the small integer scales of its groups. In q4_k and q5_k, a group is 32 weights
// with a scale and a minimum of 6 bits each. A second float16 scales the minima.
//   w = scale * group_scale * q - minimum * group_minimum.
// In q6_k, a group is 16 weights with a scale of 8 bits.
//   w = scale * group_scale * (q - 32).
//
// A panel keeps the numbers of 32 rows in the order in which the kernels read them. It has no byte more than the blocks.
// For every 256 columns it holds, one after the other:
//   q4_k, q5_k: 32 f16 scales, 32 f16 minima, then the scales and minima of the groups (see KScales).
//   q6_k: 32 f16 scales, then [16][32 rows] s8 scales of the groups.
//   All: the weights of 8 times 32 columns.
// The weights of 32 columns are, in this order:
//   q5_k: the fifth bits, [32 rows] words. Bit 8 b + k belongs to column 4 k + b.
//   q6_k: the upper bit pairs, [2][32 rows] words. Bits 8 b + 2 k and the next one of word j: column 16 j + 4 k + b.
//   All: nibbles, [4][32 rows][4] bytes. Column c is in the low half of a byte, column c + 4 in the high half.
#pragma once
#include "simd/simd.h"

namespace penstock {

constexpr int kKBlock = 256;
constexpr int kKGroups = 8;  // groups of 32 columns in a block
constexpr int kKPanel = 32;  // rows of a panel
constexpr int kNibbleBytes = kKPanel * 16;

// Scales and minima of the groups of q4_k and q5_k, 6 bits each.
//   kLow, [8][32 rows] bytes: the low 4 bits of the scale, and above them those of the minimum.
//   kHigh, [4][32 rows] bytes. The upper half of byte g has the high 2 bits of group g: those of its scale, and above
//   them those of its minimum. The lower half has those of group g + 4.
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
