#include "gemm/gemm.h"
#include "gemm/k_quant_kernels.h"
#include "gemm/tile_kernels.h"

namespace penstock {
namespace {

template <int R, Fetch F>
struct Bf16Kernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* w = panel + half * kLine;
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Floats acc[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) acc[r][h] = zeros();
    constexpr int kPairs = run_words(Encoding::kBf16);
    for (int i = 0; i < columns; i += kGroup, x += (R - 1) * kPairs) {
#pragma GCC unroll 2
      for (int k = 0; k < kPairs; ++k, w += 2 * kLine, ++x) {
        Prefetcher<F>::step(ahead, w);
        Bytes wk[kHalves];
        for (int h = 0; h < kHalves; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Bytes xk = broadcast_word(x[r * kPairs]);
          for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_bf16(acc[r][h], wk[h], xk);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, acc[r][h]);
  }
};

template <int R, Fetch F>
struct Int8Kernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* w = panel + half * kLine;
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Ints acc[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(tile.biases[r]);
    for (int i = 0; i < columns; i += kGroup, x += (R - 1) * kRun) {
#pragma GCC unroll 2
      for (int k = 0; k < kRun; ++k, w += 2 * kLine, ++x) {
        Prefetcher<F>::step(ahead, w);
        Bytes wk[kHalves];
        for (int h = 0; h < kHalves; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Bytes xk = broadcast_word(x[r * kRun]);
          for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], wk[h], xk);
        }
      }
    }
    const float* scales = reinterpret_cast<const float*>(panel + (size_t)columns * kPanel);
    for (int h = 0; h < kHalves; ++h) {
      const Floats scale = load(scales + (half + h) * kLanes);
      for (int r = 0; r < R; ++r) {
        store(out + r * kPanel + (half + h) * kLanes, to_floats(acc[r][h]) * (broadcast(tile.scales[r]) * scale));
      }
    }
  }
};

template <int R, Fetch F>
struct Int8GroupKernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* at = panel;
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Floats total[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) total[r][h] = zeros();
    for (int g = 0; g < columns / kGroup; ++g) {
      const f16* scales = reinterpret_cast<const f16*>(at) + half * kLanes;
      const uint8_t* w = at + kPanel * sizeof(f16) + half * kLine;
      Ints acc[R][kHalves];
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(tile.biases[g * R + r]);
#pragma GCC unroll 8
      for (int k = 0; k < kRun; ++k, w += 2 * kLine, ++x) {
        Prefetcher<F>::step(ahead, w);
        Bytes wk[kHalves];
        for (int h = 0; h < kHalves; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Bytes xk = broadcast_word(x[r * kRun]);
          for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], wk[h], xk);
        }
      }
      x += (R - 1) * kRun;
      for (int h = 0; h < kHalves; ++h) {
        const Floats scale = load_f16(scales + h * kLanes);
        for (int r = 0; r < R; ++r) {
          total[r][h] = fma(to_floats(acc[r][h]), scale * broadcast(tile.scales[g * R + r]), total[r][h]);
        }
      }
      at += kPanel * sizeof(f16) + kPanel * kGroup;
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, total[r][h]);
  }
};

template <int R, Fetch F>
struct Int4GroupKernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* at = panel;
    const uint32_t* x = tile.words;
    Prefetcher<F> ahead(tile);
    Floats total[R][kHalves];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) total[r][h] = zeros();
    for (int g = 0; g < columns / kGroup; ++g) {
      const f16* scales = reinterpret_cast<const f16*>(at) + half * kLanes;
      const uint8_t* w = at + 2 * kPanel * sizeof(f16) + half * kLine;
      Ints acc[R][kHalves];
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < kHalves; ++h) acc[r][h] = broadcast_int(0);
#pragma GCC unroll 4
      for (int k = 0; k < kRun / 2; ++k, w += 2 * kLine, x += 2) {
        Prefetcher<F>::step(ahead, w);
        Bytes low[kHalves], high[kHalves];
        for (int h = 0; h < kHalves; ++h) {
          const Bytes pairs = load_bytes(w + h * kLine);
          low[h] = low_nibbles(pairs);
          high[h] = high_nibbles(pairs);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Bytes x_low = broadcast_word(x[r * kRun]), x_high = broadcast_word(x[r * kRun + 1]);
          for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], low[h], x_low);
          for (int h = 0; h < kHalves; ++h) acc[r][h] = dot_u8s8(acc[r][h], high[h], x_high);
        }
      }
      x += (R - 1) * kRun;
      for (int h = 0; h < kHalves; ++h) {
        const Floats scale = load_f16(scales + h * kLanes), minimum = load_f16(scales + kPanel + h * kLanes);
        for (int r = 0; r < R; ++r) {
          const Floats product = fma(to_floats(acc[r][h]), scale * broadcast(tile.scales[g * R + r]), total[r][h]);
          total[r][h] = fma(minimum, broadcast(tile.offsets[g * R + r]), product);
        }
      }
      at += 2 * kPanel * sizeof(f16) + kPanel * kGroup / 2;
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves; ++h) store(out + r * kPanel + (half + h) * kLanes, total[r][h]);
  }
};

}  // namespace

TileKernel tile_kernel(Format format, const Tile& tile) {
  switch (format) {
    case Format::kBf16:
      return kernel_of<Bf16Kernel, Format::kBf16>(tile);
    case Format::kInt8:
      return kernel_of<Int8Kernel, Format::kInt8>(tile);
    case Format::kInt8Group:
      return kernel_of<Int8GroupKernel, Format::kInt8Group>(tile);
    case Format::kInt4Group:
      return kernel_of<Int4GroupKernel, Format::kInt4Group>(tile);
    default:
      return k_quant_kernel(format, tile);
  }
}

}  // namespace penstock
