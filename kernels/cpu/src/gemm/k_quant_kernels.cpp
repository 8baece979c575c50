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
        const Floats product = fma(to_floats(acc[r][h]), scale * broadcast(it.tile.scales[g + r]), it.total[r][h]);
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

// An unpacked panel has per 32 columns two arrays of 32 floats, then the weights as bytes, [8][32 rows][4]. The arrays
// are the scales and minima of q4_k and q5_k, or the scales of the two halves in q6_k.
constexpr int kUnpackedBytes = kPanel * kGroup;
constexpr int kUnpackedScales = 2 * kPanel * sizeof(float);
constexpr int kUnpackedGroup = kUnpackedScales + kUnpackedBytes;

// Returns word `word` of 16 rows: four columns. `extra`: the bytes before the nibbles, `w`: the nibbles, of these rows.
template <class Panel, int Word>
PENSTOCK_INLINE Bytes word_of(const uint8_t* extra, const uint8_t* w) {
  const Bytes pairs = load_bytes(w + Word / 2 * 2 * kLine);
  const Bytes nibbles = Word % 2 ? high_nibbles(pairs) : low_nibbles(pairs);
  if constexpr (Panel::kExtraBytes == Q5_KPanel::kExtraBytes) {
    return with_bits<4 - Word>(nibbles, load_bytes(extra), 0x10);
  } else if constexpr (Panel::kExtraBytes == Q6_KPanel::kExtraBytes) {
    return with_bits<4 - 2 * (Word % 4)>(nibbles, load_bytes(extra + Word / 4 * 2 * kLine), 0x30);
  } else {
    return nibbles;
  }
}

template <class Panel, int... Word>
PENSTOCK_INLINE void unpack_words(const uint8_t* group, uint8_t* out, std::integer_sequence<int, Word...>) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t *extra = group + half * kLine, *w = group + Panel::kExtraBytes + half * kLine;
    (store_bytes(out + (2 * Word + half) * kLine, word_of<Panel, Word>(extra, w)), ...);
  }
}

template <class Panel>
void unpack(const uint8_t* panel, int columns, uint8_t* out) {
  for (int g = 0; g < columns / kGroup; ++g, out += kUnpackedGroup) {
    const int in_block = g % kKGroups;
    const uint8_t* super = panel + g / kKGroups * Panel::kBytes;
    float* scales = reinterpret_cast<float*>(out);
    for (int row = 0; row < kPanel; row += kLanes) {
      if constexpr (Panel::kExtraBytes == Q6_KPanel::kExtraBytes) {
        const Floats factor = load_f16(reinterpret_cast<const f16*>(super) + row);
        const uint8_t* own = super + Q6_KPanel::kScales + in_block * 2 * kPanel + row;
        store(scales + row, factor * to_floats(widen_s8(own)));
        store(scales + kPanel + row, factor * to_floats(widen_s8(own + kPanel)));
      } else {
        const auto [scale, minimum] =
            in_block < 4 ? scales_of<false>(super, in_block, row) : scales_of<true>(super, in_block, row);
        store(scales + row, scale);
        store(scales + kPanel + row, minimum);
      }
    }
    unpack_words<Panel>(super + Panel::kFirstGroup + in_block * Panel::kGroupBytes, out + kUnpackedScales,
                        std::make_integer_sequence<int, kRun>());
  }
}

// The products of an unpacked panel with R rows: the same sums as those of the packed one.
template <int R, Fetch F, bool kHasMinima>
struct UnpackedKernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    constexpr int kParts = kHasMinima ? 1 : 2;  // runs of columns with a scale of their own
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Floats total[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) total[r][h] = zeros();
    for (int g = 0; g < columns / kGroup; ++g, panel += kUnpackedGroup) {
      const float* scales = reinterpret_cast<const float*>(panel) + half * kLanes;
      const uint8_t* w = panel + kUnpackedScales + half * kLine;
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        Ints acc[R][kHalves];
        for (int r = 0; r < R; ++r) {
          const int32_t bias = kHasMinima ? 0 : tile.half_biases[(2 * g + part) * R + r];
          for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(bias);
        }
#pragma GCC unroll 8
        for (int k = 0; k < kRun / kParts; ++k, w += 2 * kLine, ++x) {
          if (k % 2 == 0) Prefetcher<F>::step(ahead, w);
          Bytes wk[kHalves];
          for (int h = 0; h < kHalves; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const Bytes xk = broadcast_word(x[r * kRun]);
            for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], wk[h], xk);
          }
        }
        for (int h = 0; h < kHalves; ++h) {
          const Floats scale = load(scales + part * kPanel + h * kLanes);
          for (int r = 0; r < R; ++r) {
            total[r][h] = fma(to_floats(acc[r][h]), scale * broadcast(tile.scales[g * R + r]), total[r][h]);
            if constexpr (kHasMinima) {
              total[r][h] = fma(load(scales + kPanel + h * kLanes), broadcast(-tile.offsets[g * R + r]), total[r][h]);
            }
          }
        }
      }
      x += (R - 1) * kRun;
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, total[r][h]);
  }
};

template <int R, Fetch F>
using UnpackedWithMinima = UnpackedKernel<R, F, true>;
template <int R, Fetch F>
using UnpackedWithHalves = UnpackedKernel<R, F, false>;

}  // namespace

size_t unpacked_bytes(int columns) { return (size_t)columns / kGroup * kUnpackedGroup; }

void unpack_k_quant(Format format, const uint8_t* panel, int columns, uint8_t* out) {
  switch (format) {
    case Format::kQ4_K:
      return unpack<Q4_KPanel>(panel, columns, out);
    case Format::kQ5_K:
      return unpack<Q5_KPanel>(panel, columns, out);
    default:
      return unpack<Q6_KPanel>(panel, columns, out);
  }
}

TileKernel unpacked_kernel(Format format, const Tile& tile) {
  return format == Format::kQ6_K ? kernel_of<UnpackedWithHalves, Format::kQ6_K>(tile)
                                 : kernel_of<UnpackedWithMinima, Format::kQ4_K>(tile);
}

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
