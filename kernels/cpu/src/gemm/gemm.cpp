#include "gemm/gemm.h"
#include "gemm/tile_kernels.h"

namespace penstock {
namespace {

template <int R, Fetch F>
struct Bf16Kernel {
  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* w = panel + half * kLine;
    const uint32_t* x = tile.words;
    Prefetcher<F, Near::kFirstLevel> ahead(tile);
    Floats acc[R][kHalves<R>];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = zeros();
    constexpr int kPairs = run_words(Encoding::kBf16);
    for (int i = 0; i < columns; i += kGroup, x += (R - 1) * kPairs) {
#pragma GCC unroll 2
      for (int k = 0; k < kPairs; ++k, w += 2 * kLine, ++x) {
        Prefetcher<F, Near::kFirstLevel>::step(ahead, w);
        Bytes wk[kHalves<R>];
        for (int h = 0; h < kHalves<R>; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Bytes xk = broadcast_word(x[r * kPairs]);
          for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = dot_bf16(acc[r][h], wk[h], xk);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves<R>; ++h) store(out + r * kPanel + (half + h) * kLanes, acc[r][h]);
  }
};

// More rows than these take longer than the panel needs to arrive.
constexpr int kFewRows = 4;

template <int R, Fetch F>
struct Int8Kernel {
  static constexpr Near kNear = R <= kFewRows ? kNearOfFast<R> : Near::kFirstLevel;

  static void run(const uint8_t* panel, const Tile& tile, int columns, int half, float* out) {
    const uint8_t* w = panel + half * kLine;
    const uint32_t* x = tile.words;
    Prefetcher<F, kNear> ahead(tile);
    Ints acc[R][kHalves<R>];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = broadcast_int(tile.biases[r]);
    for (int i = 0; i < columns; i += kGroup, x += (R - 1) * kRun) {
#pragma GCC unroll 2
      for (int k = 0; k < kRun; k += kFactorWords, w += 2 * kLine, x += kFactorWords) {
        Prefetcher<F, kNear>::step(ahead, w);
        Bytes wk[kHalves<R>];
        for (int h = 0; h < kHalves<R>; ++h) wk[h] = load_bytes(w + h * kLine);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Factors xk = load_factors(x + r * kRun);
          for (int h = 0; h < kHalves<R>; ++h) acc[r][h] = dot_u8(acc[r][h], wk[h], xk);
        }
      }
    }
    const float* scales = reinterpret_cast<const float*>(panel + (size_t)columns * kPanel);
    for (int h = 0; h < kHalves<R>; ++h) {
      const Floats scale = load(scales + (half + h) * kLanes);
      for (int r = 0; r < R; ++r) {
        store(out + r * kPanel + (half + h) * kLanes, to_floats(acc[r][h]) * (broadcast(tile.scales[r]) * scale));
      }
    }
  }
};

}  // namespace

TileKernel tile_kernel(Format format, const Tile& tile) {
  if (format == Format::kBf16) return kernel_of<Bf16Kernel, Encoding::kBf16>(tile);
  if (format == Format::kInt8) return kernel_of<Int8Kernel, Encoding::kByRow>(tile);
  return group_kernel(format, tile);
}

}  // namespace penstock
