#include "gemm/group_kernels.h"

namespace penstock {
namespace {

// Codes are unsigned, and in some formats a code above 0 stands for the weight 0. The integer sums then begin with a
// bias that cancels this. There is none, or one for a group of columns, or one for each half of a group.
enum class Bias { kNone, kGroup, kHalf };

template <class P>
constexpr Bias bias_of() {
  if (P::kZero == 0) return Bias::kNone;
  return P::Scales::kParts == 1 ? Bias::kGroup : Bias::kHalf;
}

// How far codes are shifted to the left, so that the code of the weight 0 becomes 128 or, in halves of groups, 32. All
// formats then share one bias: minus that code, times the sum of the quantized activations. The scales are divided by
// the same power of two, which loses no bit.
template <class P>
constexpr int shift_of() {
  const int zero = P::Scales::kParts == 1 ? 128 : 32;
  int shift = 0;
  while (P::kZero > 0 && P::kZero << shift < zero) ++shift;
  return shift;
}

// The largest code, shifted so.
template <class P>
constexpr int most_of() {
  return P::kHasTable ? 255 : ((1 << (P::Bits::kLow + P::Bits::kHigh)) - 1) << shift_of<P>();
}

// A group of columns in a panel as it is stored.
template <class P>
struct PackedGroup {
  using Scales = typename P::Scales;
  static constexpr int kParts = Scales::kParts;
  static constexpr bool kHasMinima = Scales::kHasMinima;
  static constexpr Bias kBias = bias_of<P>();
  static constexpr int kShift = shift_of<P>();
  static constexpr int kMost = most_of<P>();
  static constexpr int kBytes = P::kBytes / Scales::kGroups;  // with its share of the block's scales
  template <int R>
  static constexpr Near kNear = P::Bits::kLow == 8 ? kNearOfFast<R> : kNearOfSlow<R>;
  static constexpr int kPrefetches = (kBytes + 2 * kLine - 1) / (2 * kLine);

  const uint8_t *begin, *block, *codes;
  int group;  // in the block

  PackedGroup(const uint8_t* panel, int in_row)
      : begin(panel + (size_t)in_row * kBytes),
        block(panel + (size_t)(in_row / Scales::kGroups) * P::kBytes),
        codes(block + P::group_at(in_row % Scales::kGroups)),
        group(in_row % Scales::kGroups) {}

  // Word `Word` of the first 16 rows or the last.
  template <int Word>
  PENSTOCK_INLINE Bytes word(const PackedGroup& at, int half) {
    const Bytes word = P::Bits::template word<Word, kShift>(at.codes + half * kLine);
    if constexpr (P::kHasTable) return looked_up(P::raised_table(), word);
    return word;
  }
  PENSTOCK_INLINE Floats scale(const PackedGroup& at, int part, int row) {
    const Floats scale = Scales::scale(at.block, at.group, part, row);
    if constexpr (kShift > 0) return scale * broadcast(1.f / (1 << kShift));
    return scale;
  }
  PENSTOCK_INLINE Floats minimum(const PackedGroup& at, int part, int row) {
    return Scales::minimum(at.block, at.group, part, row);
  }
};

// A group in an unpacked panel: arrays of 32 float scales and minima for each part, then [8][32 rows][4] bytes.
template <int Parts, bool HasMinima, Bias B, int Most>
struct UnpackedGroup {
  static constexpr int kParts = Parts;
  static constexpr bool kHasMinima = HasMinima;
  static constexpr Bias kBias = B;
  static constexpr int kMost = Most;
  template <int R>
  static constexpr Near kNear = Near::kNothing;  // only products with many rows unpack panels
  static constexpr int kPrefetches = 4;          // of the next packed panel, which has about half as many bytes
  static constexpr int kArrays = Parts * (1 + HasMinima);
  static constexpr int kCodes = kArrays * kPanel * sizeof(float);
  static constexpr int kBytes = kCodes + kPanel * kGroup;

  const uint8_t *begin, *codes;
  const float* scales;

  UnpackedGroup(const uint8_t* panel, int in_row)
      : begin(panel + (size_t)in_row * kBytes), codes(begin + kCodes), scales(reinterpret_cast<const float*>(begin)) {}

  template <int Word>
  PENSTOCK_INLINE Bytes word(const UnpackedGroup& at, int half) {
    return load_bytes(at.codes + (2 * Word + half) * kLine);
  }
  PENSTOCK_INLINE Floats scale(const UnpackedGroup& at, int part, int row) {
    return load(at.scales + part * kPanel + row);
  }
  PENSTOCK_INLINE Floats minimum(const UnpackedGroup& at, int part, int row) {
    return load(at.scales + (Parts + part) * kPanel + row);
  }
};
template <class P>
using UnpackedOf = UnpackedGroup<P::Scales::kParts, P::Scales::kHasMinima, bias_of<P>(), most_of<P>()>;

// The products with R rows.
template <class Group>
struct GroupKernel {
  static constexpr int kWords = kCodeWords / Group::kParts;  // of a part
  using Sums = ShortSums<Group::kMost>;

  template <int R, Fetch F>
  struct Of {
    Floats total[R][kHalves<R>];
    const uint32_t* x;
    const Tile& tile;
    Prefetcher<F, Group::template kNear<R>> ahead;

    static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
      Of it{{}, tile.words, tile, Prefetcher<F, Group::template kNear<R>>(tile)};
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves<R>; ++h) it.total[r][h] = zeros();
      for (int g = 0; g < columns / kGroup; ++g, it.x += R * kRun) {
        const Group group(panel, g);
        add_part<0>(it, group, g, half);
        if constexpr (Group::kParts == 2) add_part<1>(it, group, g, half);
      }
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves<R>; ++h) store(out + r * kPanel + (half + h) * kLanes, it.total[r][h]);
    }

    template <int Part>
    PENSTOCK_INLINE void add_part(Of& it, const Group& group, int g, int half) {
      const int first = (g * Group::kParts + Part) * R;
      Ints acc[R][kHalves<R>];
      for (int r = 0; r < R; ++r) {
        int32_t bias = 0;
        if constexpr (Group::kBias == Bias::kGroup) bias = it.tile.biases[first + r];
        if constexpr (Group::kBias == Bias::kHalf) bias = it.tile.half_biases[first + r];
        for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = broadcast_int(bias);
      }
      add_words<Part>(it, group, half, acc, std::make_integer_sequence<int, kWords>());
      const float* offsets = Group::kParts == 1 ? it.tile.offsets : it.tile.half_offsets;
      for (int h = 0; h < kHalves<R>; ++h) {
        const Floats scale = Group::scale(group, Part, (half + h) * kLanes);
        for (int r = 0; r < R; ++r) {
          const Floats factor = scale * broadcast(it.tile.scales[g * R + r]);
          it.total[r][h] = fma(to_floats(acc[r][h]), factor, it.total[r][h]);
          if constexpr (Group::kHasMinima) {
            const Floats minimum = Group::minimum(group, Part, (half + h) * kLanes);
            it.total[r][h] = fma(minimum, broadcast(-offsets[first + r]), it.total[r][h]);
          }
        }
      }
    }

    template <int Part, int... K>
    PENSTOCK_INLINE void add_words(Of& it, const Group& group, int half, Ints (&acc)[R][kHalves<R>],
                                   std::integer_sequence<int, K...>) {
      if constexpr (Sums::kWords == 0) {
        (add_word<Part * kWords + K>(it, group, half, acc), ...);
      } else {
        Sums sums[R][kHalves<R>];
        (add_small_word<Part * kWords, K>(it, group, half, sums, acc), ...);
      }
    }

    // Prefetches are spread over the words of a group, so that they cover each byte of the panel, scales included.
    template <int First, int End>
    PENSTOCK_INLINE void prefetch(Of& it, const Group& group) {
      for (int i = First; i < End; ++i)
        Prefetcher<F, Group::template kNear<R>>::step(it.ahead, group.begin + i * 2 * kLine);
    }

    // Adds the products of four columns.
    template <int Word>
    PENSTOCK_INLINE void add_word(Of& it, const Group& group, int half, Ints (&acc)[R][kHalves<R>]) {
      prefetch<Word * Group::kPrefetches / kCodeWords, (Word + 1) * Group::kPrefetches / kCodeWords>(it, group);
      Bytes w[kHalves<R>];
      for (int h = 0; h < kHalves<R>; ++h) w[h] = Group::template word<Word>(group, half + h);
      for (int r = 0; r < R; ++r) {
        const Factors x = load_factors(it.x + r * kRun + Word * kFactorWords);
        for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = dot_u8(acc[r][h], w[h], x);
      }
    }

    // The same for small codes, whose products are first summed in 16 bits: those of word K of the part.
    template <int First, int K>
    PENSTOCK_INLINE void add_small_word(Of& it, const Group& group, int half, Sums (&sums)[R][kHalves<R>],
                                        Ints (&acc)[R][kHalves<R>]) {
      constexpr int kWord = First + K;
      prefetch<kWord * Group::kPrefetches / kCodeWords, (kWord + 1) * Group::kPrefetches / kCodeWords>(it, group);
      for (int h = 0; h < kHalves<R>; ++h) {
        const Bytes w = Group::template word<kWord>(group, half + h);
        for (int r = 0; r < R; ++r) {
          const Sums products = Sums::of(w, it.x + r * kRun + kWord * kFactorWords);
          if constexpr (K % Sums::kWords == 0) {
            sums[r][h] = products;
          } else {
            sums[r][h] = Sums::plus(sums[r][h], products);
          }
          if constexpr ((K + 1) % Sums::kWords == 0 || K + 1 == kWords)
            acc[r][h] = Sums::added_to(acc[r][h], sums[r][h]);
        }
      }
    }
  };
};

template <class Group>
TileKernel kernel_for(const Tile& tile) {
  return kernel_of<GroupKernel<Group>::template Of, Encoding::kByGroup>(tile);
}

template <class Group, int... Word>
PENSTOCK_INLINE void unpack_words(const Group& group, uint8_t* out, std::integer_sequence<int, Word...>) {
  for (int half = 0; half < 2; ++half) {
    (store_bytes(out + (2 * Word + half) * kLine, Group::template word<Word>(group, half)), ...);
  }
}

template <class P>
void unpack(const uint8_t* panel, int columns, uint8_t* out) {
  using Packed = PackedGroup<P>;
  for (int g = 0; g < columns / kGroup; ++g, out += UnpackedOf<P>::kBytes) {
    const Packed group(panel, g);
    float* scales = reinterpret_cast<float*>(out);
    for (int part = 0; part < Packed::kParts; ++part) {
      for (int row = 0; row < kPanel; row += kLanes) {
        store(scales + part * kPanel + row, Packed::scale(group, part, row));
        if constexpr (Packed::kHasMinima) {
          store(scales + (Packed::kParts + part) * kPanel + row, Packed::minimum(group, part, row));
        }
      }
    }
    unpack_words(group, out + UnpackedOf<P>::kCodes, std::make_integer_sequence<int, kCodeWords>());
  }
}

}  // namespace

size_t unpacked_bytes(Format format, int columns) {
  return with_panel(format, [&]<class P>(P) { return (size_t)columns / kGroup * UnpackedOf<P>::kBytes; });
}

void unpack_panel(Format format, const uint8_t* panel, int columns, uint8_t* out) {
  with_panel(format, [&]<class P>(P) { unpack<P>(panel, columns, out); });
}

TileKernel unpacked_kernel(Format format, const Tile& tile) {
  return with_panel(format, [&]<class P>(P) { return kernel_for<UnpackedOf<P>>(tile); });
}

TileKernel group_kernel(Format format, const Tile& tile) {
  return with_panel(format, [&]<class P>(P) { return kernel_for<PackedGroup<P>>(tile); });
}

}  // namespace penstock
