#include "weights/k_quants.h"

#include <type_traits>

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

// Two groups share 32 bytes of nibbles: the first uses the low halves, the second the high ones.
int nibble_of(const uint8_t* nibbles, int group, int i) {
  return (nibbles[group / 2 * kSubgroup + i] >> (group % 2 * 4)) & 15;
}

struct Q4_KBlock {
  using Panel = Q4_KPanel;
  f16 scale, minimum;
  Scales6 groups;
  uint8_t nibbles[kKBlock / 2];

  int value(int group, int i) const { return nibble_of(nibbles, group, i); }
};
struct Q5_KBlock {
  using Panel = Q5_KPanel;
  f16 scale, minimum;
  Scales6 groups;
  uint8_t high_bits[kSubgroup];
  uint8_t nibbles[kKBlock / 2];

  int value(int group, int i) const { return nibble_of(nibbles, group, i) | ((high_bits[i] >> group) & 1) << 4; }
};
struct Q6_KBlock {
  using Panel = Q6_KPanel;
  uint8_t nibbles[kKBlock / 2];
  uint8_t pairs[kKBlock / 4];
  int8_t scales[kKBlock / 16];
  f16 scale;

  // Each half of a block has four groups of 32 weights. Their low 4 bits are in 64 bytes: first all low nibbles, then
  // all high ones. Their high 2 bits are in 32 bytes.
  int value(int group, int i) const {
    const int half = group / 4, place = group % 4;
    const int nibble = nibbles[half * 64 + place % 2 * kSubgroup + i] >> (place / 2 * 4) & 15;
    return nibble | (pairs[half * kSubgroup + i] >> (2 * place) & 3) << 4;
  }
};
static_assert(sizeof(Q4_KBlock) == 144 && sizeof(Q5_KBlock) == 176 && sizeof(Q6_KBlock) == 210);
static_assert(Q4_KPanel::kBytes == kKPanel * 144 && Q5_KPanel::kBytes == kKPanel * 176 &&
              Q6_KPanel::kBytes == kKPanel * 210);

f16& half_at(uint8_t* at, int i) { return reinterpret_cast<f16*>(at)[i]; }
f16 half_at(const uint8_t* at, int i) { return reinterpret_cast<const f16*>(at)[i]; }
uint32_t& word_at(uint8_t* at, int i) { return reinterpret_cast<uint32_t*>(at)[i]; }
uint32_t word_at(const uint8_t* at, int i) { return reinterpret_cast<const uint32_t*>(at)[i]; }

size_t nibble_at(int column, int lane) { return (column / 8 * kKPanel + lane) * 4 + column % 4; }
int fifth_bit(int column) { return column % 4 * 8 + column / 4; }
int first_of_pair(int column) { return column % 4 * 8 + column % 16 / 4 * 2; }

// Where the high bits of a group's scale are: 4 for the first four groups, else 0.
int high_shift(int group) { return group < 4 ? 4 : 0; }
int high_row(int group) { return KScales::kHigh + group % 4 * kKPanel; }

void put_scales(const Scales6& scales, uint8_t* super, int lane) {
  for (int g = 0; g < kKGroups; ++g) {
    const int scale = scales.scale(g), minimum = scales.minimum(g);
    super[KScales::kLow + g * kKPanel + lane] = (scale & 15) | (minimum & 15) << 4;
    super[high_row(g) + lane] |= ((scale >> 4) | (minimum >> 4) << 2) << high_shift(g);
  }
}

int scale_in(const uint8_t* super, int group, int lane) {
  const int high = super[high_row(group) + lane] >> high_shift(group);
  return (super[KScales::kLow + group * kKPanel + lane] & 15) | (high & 3) << 4;
}

int minimum_in(const uint8_t* super, int group, int lane) {
  const int high = super[high_row(group) + lane] >> high_shift(group);
  return super[KScales::kLow + group * kKPanel + lane] >> 4 | (high >> 2 & 3) << 4;
}

// Puts the weights of a group: all bits of `value` in q4_k, q5_k or q6_k.
template <class Panel>
void put_value(uint8_t* group, int lane, int column, int value) {
  group[Panel::kExtraBytes + nibble_at(column, lane)] |= (value & 15) << (column % 8 < 4 ? 0 : 4);
  if constexpr (std::is_same_v<Panel, Q5_KPanel>) word_at(group, lane) |= (uint32_t)(value >> 4) << fifth_bit(column);
  if constexpr (std::is_same_v<Panel, Q6_KPanel>) {
    word_at(group, column / 16 * kKPanel + lane) |= (uint32_t)(value >> 4) << first_of_pair(column);
  }
}

template <class Panel>
int value_in(const uint8_t* group, int lane, int column) {
  int value = group[Panel::kExtraBytes + nibble_at(column, lane)] >> (column % 8 < 4 ? 0 : 4) & 15;
  if constexpr (std::is_same_v<Panel, Q5_KPanel>) value |= (word_at(group, lane) >> fifth_bit(column) & 1) << 4;
  if constexpr (std::is_same_v<Panel, Q6_KPanel>) {
    value |= (word_at(group, column / 16 * kKPanel + lane) >> first_of_pair(column) & 3) << 4;
  }
  return value;
}

template <class Block>
void put_values(const Block& block, uint8_t* super, int lane) {
  using Panel = typename Block::Panel;
  for (int g = 0; g < kKGroups; ++g) {
    uint8_t* group = super + Panel::kFirstGroup + g * Panel::kGroupBytes;
    for (int i = 0; i < kSubgroup; ++i) put_value<Panel>(group, lane, i, block.value(g, i));
  }
}

template <class Block>
void put_with_minima(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane) {
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const Block*>(blocks)[b];
    uint8_t* super = panel + b * Block::Panel::kBytes;
    half_at(super, lane) = block.scale;
    half_at(super, kKPanel + lane) = block.minimum;
    put_scales(block.groups, super, lane);
    put_values(block, super, lane);
  }
}

template <class Panel>
void get_with_minima(const uint8_t* panel, int lane, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b, panel += Panel::kBytes) {
    for (int g = 0; g < kKGroups; ++g, out += kSubgroup) {
      const float scale = widen_f16(half_at(panel, lane)) * scale_in(panel, g, lane);
      const float minimum = widen_f16(half_at(panel, kKPanel + lane)) * minimum_in(panel, g, lane);
      const uint8_t* group = panel + Panel::kFirstGroup + g * Panel::kGroupBytes;
      for (int i = 0; i < kSubgroup; ++i) out[i] = scale * value_in<Panel>(group, lane, i) - minimum;
    }
  }
}

template <class Block>
void widen_with_minima(const uint8_t* blocks, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const Block*>(blocks)[b];
    for (int g = 0; g < kKGroups; ++g, out += kSubgroup) {
      const float scale = widen_f16(block.scale) * block.groups.scale(g);
      const float minimum = widen_f16(block.minimum) * block.groups.minimum(g);
      for (int i = 0; i < kSubgroup; ++i) out[i] = scale * block.value(g, i) - minimum;
    }
  }
}

}  // namespace

void widen_q4_k(const uint8_t* blocks, int num_blocks, float* out) {
  widen_with_minima<Q4_KBlock>(blocks, num_blocks, out);
}

void widen_q5_k(const uint8_t* blocks, int num_blocks, float* out) {
  widen_with_minima<Q5_KBlock>(blocks, num_blocks, out);
}

void widen_q6_k(const uint8_t* blocks, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const Q6_KBlock*>(blocks)[b];
    for (int g = 0; g < kKGroups; ++g, out += kSubgroup) {
      for (int i = 0; i < kSubgroup; ++i) {
        out[i] = widen_f16(block.scale) * block.scales[2 * g + i / 16] * (block.value(g, i) - 32);
      }
    }
  }
}

void put_q4_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane) {
  put_with_minima<Q4_KBlock>(blocks, num_blocks, panel, lane);
}

void put_q5_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane) {
  put_with_minima<Q5_KBlock>(blocks, num_blocks, panel, lane);
}

void put_q6_k(const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane) {
  for (int b = 0; b < num_blocks; ++b, panel += Q6_KPanel::kBytes) {
    const auto& block = reinterpret_cast<const Q6_KBlock*>(blocks)[b];
    half_at(panel, lane) = block.scale;
    for (int s = 0; s < 2 * kKGroups; ++s) panel[Q6_KPanel::kScales + s * kKPanel + lane] = block.scales[s];
    put_values(block, panel, lane);
  }
}

void get_q4_k(const uint8_t* panel, int lane, int num_blocks, float* out) {
  get_with_minima<Q4_KPanel>(panel, lane, num_blocks, out);
}

void get_q5_k(const uint8_t* panel, int lane, int num_blocks, float* out) {
  get_with_minima<Q5_KPanel>(panel, lane, num_blocks, out);
}

void get_q6_k(const uint8_t* panel, int lane, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b, panel += Q6_KPanel::kBytes) {
    const auto* scales = reinterpret_cast<const int8_t*>(panel + Q6_KPanel::kScales);
    for (int g = 0; g < kKGroups; ++g, out += kSubgroup) {
      const uint8_t* group = panel + Q6_KPanel::kFirstGroup + g * Q6_KPanel::kGroupBytes;
      for (int i = 0; i < kSubgroup; ++i) {
        const int scale = scales[(2 * g + i / 16) * kKPanel + lane];
        out[i] = widen_f16(half_at(panel, lane)) * scale * (value_in<Q6_KPanel>(group, lane, i) - 32);
      }
    }
  }
}

}  // namespace penstock
