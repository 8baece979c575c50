// What the kernels of all formats share: prefetching, and the choice of a kernel by number of rows.
#pragma once
#include <algorithm>
#include <array>
#include <utility>

#include "gemm/activations.h"

namespace penstock {

// Halves of a panel that a product with R rows computes in one pass over the columns.
template <int R>
constexpr int kHalves = kRegisters >= 32 || R == 1 ? 2 : 1;
// Words of a run of quantized rows.
constexpr int kRun = run_words(Encoding::kByGroup);
// Words of codes that an output has in a group of columns; a word has four codes.
constexpr int kCodeWords = kGroup / 4;

// What a kernel prefetches of the panel that it reads.
enum class Near { kNothing, kFirstLevel, kSecondLevel };

// For kernels that do little for each byte: the processor's own prefetchers keep up with them. A kernel that reads a
// panel twice prefetches it into the cache from which it reads it again.
template <int R>
constexpr Near kNearOfFast = kHalves<R> == 2 ? Near::kNothing : Near::kFirstLevel;
// For kernels that unpack bits. The second-level cache keeps more misses in flight than the first.
template <int R>
constexpr Near kNearOfSlow = kHalves<R> == 2 ? Near::kSecondLevel : Near::kFirstLevel;

// How far ahead a kernel prefetches.
constexpr int kFirstLevelBytes = 8192, kSecondLevelBytes = 6144;

// Prefetches two cache lines for every two lines of the panel that are read.
template <Fetch F, Near N>
struct Prefetcher {
  const uint8_t *first, *second;

  explicit Prefetcher(const Tile& tile) : first(tile.ahead[0]), second(tile.ahead[1]) {}
  PENSTOCK_INLINE void step(Prefetcher& it, const uint8_t* at) {
    if constexpr (F == Fetch::kThisPanel && N == Near::kFirstLevel) {
      _mm_prefetch(at + kFirstLevelBytes, _MM_HINT_T0);
      _mm_prefetch(at + kFirstLevelBytes + kLine, _MM_HINT_T0);
    } else if constexpr (F == Fetch::kThisPanel && N == Near::kSecondLevel) {
      _mm_prefetch(at + kSecondLevelBytes, _MM_HINT_T1);
      _mm_prefetch(at + kSecondLevelBytes + kLine, _MM_HINT_T1);
    } else if constexpr (F == Fetch::kNextPanel) {
      _mm_prefetch(it.first, _MM_HINT_T1);
      _mm_prefetch(it.second, _MM_HINT_T1);
      it.first += kLine;
      it.second += kLine;
    }
  }
};

// out: [tile.rows][kPanel].
using TileKernel = void (*)(const uint8_t* panel, const Tile& tile, int padded_columns, float* out);

template <template <int, Fetch> class Kernel, int R, Fetch F>
void run_kernel(const uint8_t* panel, const Tile& tile, int columns, float* out) {
  for (int half = 0; half < 2; half += kHalves<R>) Kernel<R, F>::run(panel, tile, columns, half, out);
}

template <template <int, Fetch> class Kernel, Fetch F, int... R>
constexpr std::array<TileKernel, sizeof...(R)> kernels_of(std::integer_sequence<int, R...>) {
  return {run_kernel<Kernel, R + 1, F>...};
}

template <template <int, Fetch> class Kernel, Encoding E>
TileKernel kernel_of(const Tile& tile) {
  constexpr auto kAll = std::make_integer_sequence<int, max_tile_rows(E)>();
  constexpr auto kFew = std::make_integer_sequence<int, std::min(max_tile_rows(E), kMemoryBoundRows)>();
  static constexpr auto kThis = kernels_of<Kernel, Fetch::kThisPanel>(kFew);
  static constexpr auto kNext = kernels_of<Kernel, Fetch::kNextPanel>(kAll);
  static constexpr auto kNothing = kernels_of<Kernel, Fetch::kNothing>(kAll);
  switch (tile.fetch) {
    case Fetch::kThisPanel:
      return kThis[tile.rows - 1];
    case Fetch::kNextPanel:
      return kNext[tile.rows - 1];
    default:
      return kNothing[tile.rows - 1];
  }
}

}  // namespace penstock
