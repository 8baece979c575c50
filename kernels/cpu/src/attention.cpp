#include "attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "activations.h"

namespace penstock {
namespace {

constexpr int kChunkPages = 4;
constexpr int kChunk = kChunkPages * kPage;
// Stands for a score that is masked: finite, so that a difference of two is no NaN.
constexpr float kMasked = -1e30f;

// The cells of a chunk of at most kChunk tokens; those past the context repeat the last one.
struct Chunk {
  int count;
  uint8_t* cells[kChunkPages];

  Chunk(const KvCache& cache, const QueryRows& rows, int first_token, int end)
      : count(std::min(kChunkPages, (end - first_token + kPage - 1) / kPage)) {
    for (int i = 0; i < kChunkPages; ++i) {
      cells[i] = cache.cell(rows.layer, rows.block_table, first_token / kPage + std::min(i, count - 1), rows.head);
    }
  }
};

// Asks for what is read next of two pages: their values, and the keys of the pages one chunk on.
struct Ahead {
  const uint8_t* lines[4];

  Ahead(const KvCache& cache, const Chunk& chunk, const Chunk& next, int i)
      : lines{cache.values(chunk.cells[i]), cache.values(chunk.cells[i + 1]), next.cells[i], next.cells[i + 1]} {}

  PENSTOCK_INLINE void ask(const Ahead& ahead, size_t at) {
    for (const uint8_t* line : ahead.lines) _mm_prefetch(line + at, _MM_HINT_T0);
  }
};

// Scores of all rows against a chunk's pages, as sixteen tokens a vector.
template <int R, int D>
struct Bf16Cache {
  const KvCache& cache;
  const QueryRows& rows;
  const int dim;
  alignas(64) bf16 q[R][D ? D : kMaxHeadDim];
  alignas(64) bf16 p[R][kChunk];

  Bf16Cache(const KvCache& cache, const QueryRows& rows) : cache(cache), rows(rows), dim(D ? D : cache.shape().head_dim) {
    for (int r = 0; r < R; ++r)
      for (int d = 0; d < dim; d += kLanes) store_bf16(q[r] + d, load(rows.queries + r * dim + d));
  }

  void scores(const Chunk& chunk, const Chunk& next, int i, Floats (&s)[R][kChunkPages]) {
    const uint8_t* keys[2] = {chunk.cells[i], chunk.cells[i + 1]};
    const Ahead ahead(cache, chunk, next, i);
    Floats acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zeros();
#pragma GCC unroll 1
    for (int k = 0; k < dim / 2; ++k) {
      Ahead::ask(ahead, k * 64);
      const Bytes k0 = load_bytes(keys[0] + k * 64), k1 = load_bytes(keys[1] + k * 64);
      for (int r = 0; r < R; ++r) {
        uint32_t word;
        std::memcpy(&word, q[r] + 2 * k, sizeof word);
        const Bytes qk = broadcast_word(word);
        acc[r][0] = dot_bf16(acc[r][0], k0, qk);
        acc[r][1] = dot_bf16(acc[r][1], k1, qk);
      }
    }
    const Floats scale = broadcast(rows.scale);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 2; ++j) s[r][i + j] = acc[r][j] * scale;
  }

  void set_weights(int r, const Chunk&, const Floats (&weights)[kChunkPages]) {
    for (int i = 0; i < kChunkPages; ++i) store_bf16(p[r] + i * kPage, weights[i]);
  }

  template <class Acc>
  void add_values(const Chunk& chunk, const Chunk& next, Acc& acc) {
    for (int i = 0; i < chunk.count; ++i) {
      const uint8_t *values = cache.values(chunk.cells[i]), *later = cache.values(next.cells[i]);
      for (int t = 0; t < kPage; t += 2, values += dim * 4, later += dim * 4) {
        uint32_t words[R];
        for (int r = 0; r < R; ++r) std::memcpy(&words[r], &p[r][i * kPage + t], sizeof words[r]);
        for (int j = 0; j < dim / kLanes; ++j) {
          // A full tile is a prompt's, whose keys and values are in cache.
          if constexpr (R < kMaxQueryRows) _mm_prefetch(later + j * 64, _MM_HINT_T0);
          const Bytes v = load_bytes(values + j * 64);
          for (int r = 0; r < R; ++r) acc[r][j] = dot_bf16(acc[r][j], v, broadcast_word(words[r]));
        }
      }
    }
  }
};

template <int R, int D>
struct Int8Cache {
  const KvCache& cache;
  const QueryRows& rows;
  const int dim;
  alignas(64) int8_t q[R][D ? D : kMaxHeadDim];
  alignas(64) uint8_t p[R][kChunk];
  float q_scale[R], p_scale[R];
  int32_t q_sum[R];

  Int8Cache(const KvCache& cache, const QueryRows& rows) : cache(cache), rows(rows), dim(D ? D : cache.shape().head_dim) {
    for (int r = 0; r < R; ++r) q_scale[r] = rows.scale * quantise_row(rows.queries + r * dim, dim, q[r], &q_sum[r]);
  }

  void scores(const Chunk& chunk, const Chunk& next, int i, Floats (&s)[R][kChunkPages]) {
    const uint8_t* keys[2] = {chunk.cells[i], chunk.cells[i + 1]};
    const Ahead ahead(cache, chunk, next, i);
    Ints acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = broadcast_int(-128 * q_sum[r]);
#pragma GCC unroll 1
    for (int k = 0; k < dim / 4; ++k) {
      Ahead::ask(ahead, k * 64);
      const Bytes k0 = load_bytes(keys[0] + k * 64), k1 = load_bytes(keys[1] + k * 64);
      for (int r = 0; r < R; ++r) {
        uint32_t word;
        std::memcpy(&word, q[r] + 4 * k, sizeof word);
        const Bytes qk = broadcast_word(word);
        acc[r][0] = dot_u8s8(acc[r][0], k0, qk);
        acc[r][1] = dot_u8s8(acc[r][1], k1, qk);
      }
    }
    for (int j = 0; j < 2; ++j) {
      const Floats scale = load(cache.key_scales(chunk.cells[i + j]));
      for (int r = 0; r < R; ++r) s[r][i + j] = to_floats(acc[r][j]) * scale * broadcast(q_scale[r]);
    }
  }

  // The values' scales go into the weights, which are then quantised over the chunk.
  void set_weights(int r, const Chunk& chunk, const Floats (&weights)[kChunkPages]) {
    Floats scaled[kChunkPages], most = zeros();
    for (int i = 0; i < kChunkPages; ++i) {
      const Floats product = weights[i] * load(cache.value_scales(chunk.cells[i]));
      scaled[i] = select(equal(weights[i], zeros()), zeros(), product);
      most = max(most, scaled[i]);
    }
    const float m = largest(most);
    p_scale[r] = m * (1 / 255.f);
    const Floats inverse = broadcast(m > 0 ? 255.f / m : 0.f);
    for (int i = 0; i < kChunkPages; ++i) store_u8(p[r] + i * kPage, to_ints(scaled[i] * inverse));
  }

  template <class Acc>
  void add_values(const Chunk& chunk, const Chunk& next, Acc& acc) {
    constexpr int kVectors = (D ? D : kMaxHeadDim) / kLanes;
    Ints sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < dim / kLanes; ++j) sums[r][j] = broadcast_int(0);
    for (int i = 0; i < chunk.count; ++i) {
      const uint8_t *values = cache.values(chunk.cells[i]), *later = cache.values(next.cells[i]);
      for (int t = 0; t < kPage; t += 4, values += dim * 4, later += dim * 4) {
        uint32_t words[R];
        for (int r = 0; r < R; ++r) std::memcpy(&words[r], &p[r][i * kPage + t], sizeof words[r]);
        for (int j = 0; j < dim / kLanes; ++j) {
          // A full tile is a prompt's, whose keys and values are in cache.
          if constexpr (R < kMaxQueryRows) _mm_prefetch(later + j * 64, _MM_HINT_T0);
          const Bytes v = load_bytes(values + j * 64);
          for (int r = 0; r < R; ++r) sums[r][j] = dot_u8s8(sums[r][j], broadcast_word(words[r]), v);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < dim / kLanes; ++j) acc[r][j] = fma(to_floats(sums[r][j]), broadcast(p_scale[r]), acc[r][j]);
  }
};

template <template <int, int> class Cache, int R, int D>
void run_span(const KvCache& kv, const QueryRows& rows, int begin, int end, RowState* out) {
  constexpr int kVectors = (D ? D : kMaxHeadDim) / kLanes;
  Cache<R, D> cache(kv, rows);
  const int vectors = cache.dim / kLanes;
  float top[R];
  Floats total[R], acc[R][kVectors];
  for (int r = 0; r < R; ++r) {
    top[r] = kMasked;
    total[r] = zeros();
    for (int j = 0; j < vectors; ++j) acc[r][j] = zeros();
  }
  const int first_limit = *std::min_element(rows.limits, rows.limits + R);
  for (int at = begin; at < end; at += kChunk) {
    const Chunk chunk(kv, rows, at, end);
    const Chunk next(kv, rows, at + kChunk < end ? at + kChunk : at, end);
    Floats s[R][kChunkPages];
    for (int i = 0; i < kChunkPages; i += 2) {
      if (i < chunk.count) {
        cache.scores(chunk, next, i, s);
      } else {
        for (int r = 0; r < R; ++r) s[r][i] = s[r][i + 1] = broadcast(kMasked);
      }
    }
    const bool masks = at + kChunk > first_limit || chunk.count < kChunkPages;
    for (int r = 0; r < R; ++r) {
      Mask seen[kChunkPages];
      Floats most = broadcast(kMasked);
      for (int i = 0; i < kChunkPages; ++i) {
        if (masks) {
          seen[i] = less(lane_numbers() + broadcast_int(at + i * kPage), broadcast_int(rows.limits[r]));
          s[r][i] = select(seen[i], s[r][i], broadcast(kMasked));
        }
        most = max(most, s[r][i]);
      }
      const float m = std::max(largest(most), top[r]);
      if (m > top[r]) {
        const float fade = std::exp(top[r] - m);
        top[r] = m;
        total[r] = total[r] * broadcast(fade);
        for (int j = 0; j < vectors; ++j) acc[r][j] = acc[r][j] * broadcast(fade);
      }
      Floats weights[kChunkPages];
      for (int i = 0; i < kChunkPages; ++i) {
        weights[i] = exp_of_negative(s[r][i] - broadcast(m));
        if (masks) weights[i] = select(seen[i], weights[i], zeros());
        total[r] = total[r] + weights[i];
      }
      cache.set_weights(r, chunk, weights);
    }
    cache.add_values(chunk, next, acc);
  }
  for (int r = 0; r < R; ++r) {
    out[r].total = sum(total[r]);
    out[r].largest = top[r];
    for (int j = 0; j < vectors; ++j) store(out[r].values + j * kLanes, acc[r][j]);
  }
}

using SpanKernel = void (*)(const KvCache&, const QueryRows&, int, int, RowState*);

template <template <int, int> class Cache, int D, int... R>
constexpr std::array<SpanKernel, sizeof...(R)> kernels_of(std::integer_sequence<int, R...>) {
  return {run_span<Cache, R + 1, D>...};
}

template <template <int, int> class Cache, int D>
constexpr auto kKernels = kernels_of<Cache, D>(std::make_integer_sequence<int, kMaxQueryRows>());

template <template <int, int> class Cache>
SpanKernel kernel_of(int head_dim, int rows) {
  switch (head_dim) {
    case 64:
      return kKernels<Cache, 64>[rows - 1];
    case 128:
      return kKernels<Cache, 128>[rows - 1];
    default:
      return kKernels<Cache, 0>[rows - 1];
  }
}

}  // namespace

void attend_span(const KvCache& cache, const QueryRows& rows, int begin, int end, RowState* out) {
  const int dim = cache.shape().head_dim;
  const bool is_bf16 = cache.shape().format == KvFormat::kBf16;
  (is_bf16 ? kernel_of<Bf16Cache>(dim, rows.count) : kernel_of<Int8Cache>(dim, rows.count))(cache, rows, begin, end, out);
}

void merge(RowState& state, const RowState& later, int head_dim) {
  if (later.total == 0) return;
  if (state.total == 0) {
    state = later;
    return;
  }
  const float top = std::max(state.largest, later.largest);
  const float fade = std::exp(state.largest - top), later_fade = std::exp(later.largest - top);
  for (int d = 0; d < head_dim; d += kLanes) {
    store(state.values + d, fma(load(later.values + d), broadcast(later_fade), load(state.values + d) * broadcast(fade)));
  }
  state.total = state.total * fade + later.total * later_fade;
  state.largest = top;
}

void finish(const RowState& state, int head_dim, float* out) {
  const Floats inverse = broadcast(1.f / state.total);
  for (int d = 0; d < head_dim; d += kLanes) store(out + d, load(state.values + d) * inverse);
}

void attend(const KvCache& cache, const QueryRows& rows, int end, RowState* out) {
  RowState later[kMaxQueryRows];
  attend_span(cache, rows, 0, std::min(end, kSpan), out);
  for (int begin = kSpan; begin < end; begin += kSpan) {
    attend_span(cache, rows, begin, std::min(end, begin + kSpan), later);
    for (int r = 0; r < rows.count; ++r) merge(out[r], later[r], cache.shape().head_dim);
  }
}

}  // namespace penstock
