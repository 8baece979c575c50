#include "gemm/k_quant_kernels.h"

#include "gemm/tile_kernels.h"
#include "weights/k_quants.h"

namespace penstock {
namespace {

static_assert(kPanel == kKPanel);

struct ScaleAndMinimum {
  Floats scale, minimum;
};

// Returns the scales and minima of 16 rows in group `group` of a block; `kIsLate`: it is one of the last four.
template <bool kIsLate>
PENSTOCK_INLINE ScaleAndMinimum scales_of(const uint8_t* super, int group, int row) {
  const Ints low = widen_u8(super + KScales::kLow + group * kPanel + row);
  const Ints high = widen_u8(super + KScales::kHigh + group % 4 * kPanel + row);
  const Ints nibble = broadcast_int(15), pair = broadcast_int(48);
  const Ints scale = (low & nibble) | ((kIsLate ? shift_left(high, 4) : high) & pair);
  const Ints minimum = shift_right(low, 4) | ((kIsLate ? shift_left(high, 2) : shift_right(high, 2)) & pair);
  const f16* factors = reinterpret_cast<const f16*>(super) + row;
  return {load_f16(factors) * to_floats(scale), load_f16(factors + kPanel) * to_floats(minimum)};
}

// The products of q4_k and q5_k with R rows.
template <int R, Fetch F, class Panel>
struct KernelWithMinima {
  static constexpr bool kHasFifthBit = Panel::kExtraBytes != 0;

  Floats total[R][kHalves];
  const uint32_t* x;
  const Tile& tile;
  Prefetcher<F> ahead;

  // Adds the products of four groups, the first or the last ones of a block. `first`: the first one in the row.
  template <bool kAreLate>
  PENSTOCK_INLINE void add_groups(KernelWithMinima& it, const uint8_t* super, int first, int half) {
#pragma GCC unroll 1
    for (int g = 0; g < kKGroups / 2; ++g) add_group<kAreLate>(it, super, kAreLate ? g + 4 : g, first + g, half);
  }

  template <bool kIsLate>
  PENSTOCK_INLINE void add_group(KernelWithMinima& it, const uint8_t* super, int in_block, int in_row, int half) {
    const uint8_t* group = super + Panel::kFirstGroup + in_block * Panel::kGroupBytes;
    const uint8_t* w = group + Panel::kExtraBytes + half * kLine;
    Bytes fifth[kHalves];
    if constexpr (kHasFifthBit) {
      for (int h = 0; h < kHalves; ++h) fifth[h] = load_bytes(group + (half + h) * kLine);
    }
    Ints acc[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(0);
    it.template add_words<0>(it, w, fifth, acc);
    it.template add_words<1>(it, w, fifth, acc);
    it.template add_words<2>(it, w, fifth, acc);
    it.template add_words<3>(it, w, fifth, acc);
    it.x += R * kRun;
    const int g = in_row * R;
    for (int h = 0; h < kHalves; ++h) {
      const auto [scale, minimum] = scales_of<kIsLate>(super, in_block, (half + h) * kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats product =
            fma(to_floats(acc[r][h]), scale * broadcast(it.tile.scales[g + r]), it.total[r][h]);
        it.total[r][h] = fma(minimum, broadcast(-it.tile.offsets[g + r]), product);
      }
    }
  }

  // Adds the products of words 2 K and 2 K + 1, which are eight columns.
  template <int K>
  PENSTOCK_INLINE void add_words(KernelWithMinima& it, const uint8_t* w, const Bytes (&fifth)[kHalves],
                                 Ints (&acc)[R][kHalves]) {
    w += K * 2 * kLine;
    Prefetcher<F>::step(it.ahead, w);
    Bytes low[kHalves], high[kHalves];
    for (int h = 0; h < kHalves; ++h) {
      const Bytes pairs = load_bytes(w + h * kLine);
      low[h] = low_nibbles(pairs);
      high[h] = high_nibbles(pairs);
      if constexpr (kHasFifthBit) {
        low[h] = with_bits<4 - 2 * K>(low[h], fifth[h], 0x10);
        high[h] = with_bits<3 - 2 * K>(high[h], fifth[h], 0x10);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Bytes x_low = broadcast_word(it.x[r * kRun + 2 * K]), x_high = broadcast_word(it.x[r * kRun + 2 * K + 1]);
      for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], low[h], x_low);
      for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], high[h], x_high);
    }
  }

  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    KernelWithMinima it{{}, tile.words, tile, Prefetcher<F>(tile)};
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) it.total[r][h] = zeros();
    for (int g = 0; g < columns / kGroup; g += kKGroups, panel += Panel::kBytes) {
      add_groups<false>(it, panel, g, half);
      add_groups<true>(it, panel, g + kKGroups / 2, half);
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, it.total[r][h]);
  }
};

template <int R, Fetch F>
using Q4_KKernel = KernelWithMinima<R, F, Q4_KPanel>;
template <int R, Fetch F>
using Q5_KKernel = KernelWithMinima<R, F, Q5_KPanel>;

// The products of q6_k with R rows.
template <int R, Fetch F>
struct Q6_KKernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Floats total[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) total[r][h] = zeros();
    for (int g = 0; g < columns / kGroup; ++g) {
      const uint8_t* super = panel + g / kKGroups * Q6_KPanel::kBytes;
      const uint8_t* group = super + Q6_KPanel::kFirstGroup + g % kKGroups * Q6_KPanel::kGroupBytes;
      Floats factor[kHalves];
      for (int h = 0; h < kHalves; ++h) factor[h] = load_f16(reinterpret_cast<const f16*>(super) + (half + h) * kLanes);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {  // half of the group: one scale per row
        const int scales = Q6_KPanel::kScales + (g % kKGroups * 2 + part) * kPanel;
        const uint8_t* w = group + Q6_KPanel::kExtraBytes + (part * 2 * 2 + half) * kLine;
        Bytes pairs[kHalves];
        for (int h = 0; h < kHalves; ++h) pairs[h] = load_bytes(group + (part * 2 + half + h) * kLine);
        Ints acc[R][kHalves];
        for (int r = 0; r < R; ++r)
          for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(tile.half_biases[(2 * g + part) * R + r]);
        Prefetcher<F>::step(ahead, w);
        add_words<4, 2>(w, pairs, x + part * 4, acc);
        Prefetcher<F>::step(ahead, w + 2 * kLine);
        add_words<0, -2>(w + 2 * kLine, pairs, x + part * 4 + 2, acc);
        for (int h = 0; h < kHalves; ++h) {
          const Floats scale = factor[h] * to_floats(widen_s8(super + scales + (half + h) * kLanes));
          for (int r = 0; r < R; ++r) {
            total[r][h] = fma(to_floats(acc[r][h]), scale * broadcast(tile.scales[g * R + r]), total[r][h]);
          }
        }
      }
      x += R * kRun;
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, total[r][h]);
  }

  // Adds the products of two words, which are eight columns. The shifts bring their bit pairs above the nibbles.
  template <int kShiftOfLow, int kShiftOfHigh>
  PENSTOCK_INLINE void add_words(const uint8_t* w, const Bytes (&pairs)[kHalves], const uint32_t* x,
                                 Ints (&acc)[R][kHalves]) {
    Bytes low[kHalves], high[kHalves];
    for (int h = 0; h < kHalves; ++h) {
      const Bytes nibbles = load_bytes(w + h * kLine);
      low[h] = with_bits<kShiftOfLow>(low_nibbles(nibbles), pairs[h], 0x30);
      high[h] = with_bits<kShiftOfHigh>(high_nibbles(nibbles), pairs[h], 0x30);
    }
    for (int r = 0; r < R; ++r) {
      const Bytes x_low = broadcast_word(x[r * kRun]), x_high = broadcast_word(x[r * kRun + 1]);
      for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], low[h], x_low);
      for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], high[h], x_high);
    }
  }
};

}  // namespace

TileKernel k_quant_kernel(Format format, const Tile& tile) {
  switch (format) {
    case Format::kQ4_K:
      return kernel_of<Q4_KKernel, Format::kQ4_K>(tile);
    case Format::kQ5_K:
      return kernel_of<Q5_KKernel, Format::kQ5_K>(tile);
    default:
      return kernel_of<Q6_KKernel, Format::kQ6_K>(tile);
  }
}

}  // namespace penstock
