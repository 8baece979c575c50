// GGUF's k-quants. A block has one float16, which scales the small integer scales of its groups. A group is 32
// weights with a scale and a minimum of 6 bits each (q4_k, q5_k), or 16 weights with a scale of 8 bits (q6_k).
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#include "gemm/k_quants.h"

namespace penstock {
namespace {

constexpr int kSubgroup = 32;

// Scales and minima of eight groups of 32, 6 bits each. Those of the first four groups are in the low bits of bytes 0
// to 3 and 4 to 7. The other four have their low 4 bits in bytes 8 to 11, and their high 2 bits above those of bytes
// 0 to 7.
struct Scales6 {
  uint8_t bytes[12];

  int scale(int group) const {
    return group < 4 ? bytes[group] & 63 : (bytes[group + 4] & 15) | (bytes[group - 4] >> 6 << 4);
  }
  int minimum(int group) const {
    return group < 4 ? bytes[group + 4] & 63 : (bytes[group + 4] >> 4) | (bytes[group] >> 6 << 4);
  }
};

struct Q4_KBlock {
  f16 scale, minimum;
  Scales6 groups;
  uint8_t nibbles[kKBlock / 2];

  int high_bit(int, int) const { return 0; }
};
struct Q5_KBlock {
  f16 scale, minimum;
  Scales6 groups;
  uint8_t high_bits[kSubgroup];
  uint8_t nibbles[kKBlock / 2];

  int high_bit(int group, int i) const { return ((high_bits[i] >> group) & 1) << 4; }
};
struct Q6_KBlock {
  uint8_t nibbles[kKBlock / 2];
  uint8_t pairs[kKBlock / 4];
  int8_t scales[kKBlock / 16];
  f16 scale;
};
static_assert(sizeof(Q4_KBlock) == 144 && sizeof(Q5_KBlock) == 176 && sizeof(Q6_KBlock) == 210);

// Two groups share 32 bytes: the first uses the low nibbles, the second the high ones.
template <class Block>
void widen_groups_of_32(const uint8_t* data, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const Block*>(data)[b];
    for (int group = 0; group < kKBlock / kSubgroup; ++group, out += kSubgroup) {
      const float scale = widen_f16(block.scale) * block.groups.scale(group);
      const float minimum = widen_f16(block.minimum) * block.groups.minimum(group);
      const uint8_t* nibbles = block.nibbles + group / 2 * kSubgroup;
      const int shift = group % 2 * 4;
      for (int i = 0; i < kSubgroup; ++i) {
        out[i] = scale * (((nibbles[i] >> shift) & 15) + block.high_bit(group, i)) - minimum;
      }
    }
  }
}

}  // namespace

void widen_q4_k(const uint8_t* data, int num_blocks, float* out) {
  widen_groups_of_32<Q4_KBlock>(data, num_blocks, out);
}

void widen_q5_k(const uint8_t* data, int num_blocks, float* out) {
  widen_groups_of_32<Q5_KBlock>(data, num_blocks, out);
}

// Each half of a block has four runs of 32 weights. Their low 4 bits are in 64 bytes: first all low nibbles, then all
// high ones. Their high 2 bits are in 32 bytes.
void widen_q6_k(const uint8_t* data, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const Q6_KBlock*>(data)[b];
    for (int run = 0; run < kKBlock / kSubgroup; ++run, out += kSubgroup) {
      const int half = run / 4, place = run % 4;
      const uint8_t* nibbles = block.nibbles + half * 64 + place % 2 * kSubgroup;
      const uint8_t* pairs = block.pairs + half * kSubgroup;
      for (int i = 0; i < kSubgroup; ++i) {
        const int q = ((nibbles[i] >> (place / 2 * 4)) & 15) | (((pairs[i] >> (2 * place)) & 3) << 4);
        out[i] = widen_f16(block.scale) * block.scales[run * 2 + i / 16] * (q - 32);
      }
    }
  }
}

}  // namespace penstock
