// Chunks of the KV cache, and how rows are multiplied with them in each format of the cache.
#pragma once
#include <algorithm>

#include "attention/attention.h"
#include "gemm/activations.h"

namespace penstock {

// The cells of a chunk of at most kChunk tokens. Entries past the end of the context repeat the last cell.
struct Chunk {
  int count;
  uint8_t* cells[kChunkPages];

  Chunk(const KvLayer& cache, const Context& context, int first_token)
      : count(std::min(kChunkPages, (context.tokens - first_token + kPage - 1) / kPage)) {
    for (int i = 0; i < kChunkPages; ++i) {
      cells[i] = cache.cell(context.block_table, first_token / kPage + std::min(i, count - 1), context.head);
    }
  }
};

// The four bytes at an address, in each lane.
template <class T>
PENSTOCK_INLINE Bytes broadcast_word_at(const T* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return broadcast_word(word);
}

// Prefetches the cache lines of a chunk's cells one by one, so that memory always has work.
class Fetcher {
 public:
  // Lines to prefetch with each step of the products with keys, each vector of weights, and each vector of values.
  // They come early, but never more at once than a core can wait for.
  static constexpr int kWithKeys = 4, kWithWeights = 2, kWithValues = 1;

  Fetcher(const Chunk& chunk, size_t cell_bytes) : chunk_(chunk), cell_bytes_(cell_bytes) { enter(0); }

  PENSTOCK_INLINE void ask(Fetcher& it, int lines) {
    for (int i = 0; i < lines; ++i) {
      _mm_prefetch(it.at_, _MM_HINT_T0);
      it.at_ += kLine;
      if (it.at_ >= it.end_) it.enter(it.cell_ + 1);
    }
  }
  PENSTOCK_INLINE void ask_rest(Fetcher& it) {
    while (it.cell_ < kChunkPages) ask(it, 1);
  }

 private:
  // After the last cell it starts over with the first, which costs nothing.
  void enter(int cell) {
    cell_ = cell;
    at_ = chunk_.cells[cell % kChunkPages];
    end_ = at_ + cell_bytes_;
  }

  const Chunk& chunk_;
  const size_t cell_bytes_;
  int cell_;
  const uint8_t *at_, *end_;
};

// Products of rows with cells of bf16.
template <int R, int D>
struct Bf16Cache {
  using Number = bf16;
  using Weight = bf16;
  using Sums = Floats;
  // A line of 64 bytes is multiplied in this many parts; a factor has as many elements as a part has for each lane.
  static constexpr int kParts = 1, kPerPart = 2;
  // How many channels of a key share a scale; 0: keys have no scales.
  static constexpr int kGroup = 0;
  float scale;
  alignas(64) Number q[R][D ? D : kMaxHeadDim];
  alignas(64) Weight p[R][kChunk];

  Bf16Cache(const QueryRows& rows, int dim) : scale(rows.scale * kLog2E) {
    for (int r = 0; r < R; ++r)
      for (int d = 0; d < dim; d += kLanes) store_bf16(q[r] + d, load(rows.queries + r * dim + d));
  }

  static Bytes part(const uint8_t* at) { return load_bytes(at); }
  template <class T>
  static Bytes factor(const T* at) {
    return broadcast_word_at(at);
  }
  static Sums dot_keys(Sums sums, Bytes keys, Bytes query) { return dot_bf16(sums, keys, query); }
  static Sums dot_values(Sums sums, Bytes values, Bytes weights) { return dot_bf16(sums, values, weights); }
  Sums first_score(int, int) const { return zeros(); }
  Floats scales_of(const KvLayer&, uint8_t*, int) const { return broadcast(scale); }
  Floats score(Sums sums, int, int, Floats scale, Floats) const { return sums * scale; }

  void set_weights(const KvLayer&, const Chunk&, const Floats (&weights)[R][kChunkPages]) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kChunkPages; ++i) store_bf16(p[r] + i * kPage, weights[r][i]);
  }
  Sums first_value(Floats faded) const { return faded; }
  Floats value(Sums sums, int, Floats) const { return sums; }
};

// Products of rows with cells of f16, which are widened. Queries and weights stay in single precision.
template <int R, int D>
struct F16Cache {
  using Number = float;
  using Weight = float;
  using Sums = Floats;
  static constexpr int kParts = 2, kPerPart = 1, kGroup = 0;
  float scale;
  alignas(64) Number q[R][D ? D : kMaxHeadDim];
  alignas(64) Weight p[R][kChunk];

  F16Cache(const QueryRows& rows, int dim) : scale(rows.scale * kLog2E) {
    for (int r = 0; r < R; ++r)
      for (int d = 0; d < dim; d += kLanes) store(q[r] + d, load(rows.queries + r * dim + d));
  }

  static Floats part(const uint8_t* at) { return load_f16(reinterpret_cast<const f16*>(at)); }
  static Floats factor(const float* at) { return broadcast(*at); }
  static Sums dot_keys(Sums sums, Floats keys, Floats query) { return fma(keys, query, sums); }
  static Sums dot_values(Sums sums, Floats values, Floats weights) { return fma(values, weights, sums); }
  Sums first_score(int, int) const { return zeros(); }
  Floats scales_of(const KvLayer&, uint8_t*, int) const { return broadcast(scale); }
  Floats score(Sums sums, int, int, Floats scale, Floats) const { return sums * scale; }

  void set_weights(const KvLayer&, const Chunk&, const Floats (&weights)[R][kChunkPages]) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kChunkPages; ++i) store(p[r] + i * kPage, weights[r][i]);
  }
  Sums first_value(Floats faded) const { return faded; }
  Floats value(Sums sums, int, Floats) const { return sums; }
};

// Products of rows with cells of int8: both sides are integers.
template <int R, int D>
struct Int8Cache {
  using Number = int8_t;
  using Weight = uint8_t;
  using Sums = Ints;
  static constexpr int kParts = 1, kPerPart = 4, kGroup = kKeyGroup;
  static constexpr int kGroups = ((D ? D : kMaxHeadDim) + kGroup - 1) / kGroup;
  alignas(64) Number q[R][D ? D : kMaxHeadDim];
  alignas(64) Weight p[R][kChunk];
  alignas(64) float p_scale[kLanes];
  float q_scale[kGroups][R];
  int32_t q_sum[kGroups][R];

  Int8Cache(const QueryRows& rows, int dim) {
    for (int r = 0; r < R; ++r) {
      for (int g = 0, d = 0; d < dim; ++g, d += kGroup) {
        const float* query = rows.queries + r * dim + d;
        q_scale[g][r] = rows.scale * kLog2E * quantize_row(query, std::min(kGroup, dim - d), q[r] + d, &q_sum[g][r]);
      }
    }
  }

  static Bytes part(const uint8_t* at) { return load_bytes(at); }
  template <class T>
  static Bytes factor(const T* at) {
    return broadcast_word_at(at);
  }
  static Sums dot_keys(Sums sums, Bytes keys, Bytes query) { return dot_u8s8(sums, keys, query); }
  static Sums dot_values(Sums sums, Bytes values, Bytes weights) { return dot_u8s8(sums, weights, values); }
  Sums first_score(int r, int group) const { return broadcast_int(-128 * q_sum[group][r]); }
  Floats scales_of(const KvLayer& cache, uint8_t* cell, int group) const { return load(cache.key_scales(cell, group)); }
  Floats score(Sums sums, int r, int group, Floats scales, Floats others) const {
    return fma(to_floats(sums) * scales, broadcast(q_scale[group][r]), others);
  }

  // Multiplies the weights by the scales of the values, then quantizes them over the chunk.
  void set_weights(const KvLayer& cache, const Chunk& chunk, Floats (&weights)[R][kChunkPages]) {
    Floats most[R];
    for (int r = 0; r < R; ++r) most[r] = zeros();
    for (int i = 0; i < kChunkPages; ++i) {
      const Floats scale = load(cache.value_scales(chunk.cells[i]));
      for (int r = 0; r < R; ++r) {
        Floats& weight = weights[r][i];
        // The scale of a masked token may be stale memory.
        weight = select(equal(weight, zeros()), zeros(), weight * scale);
        most[r] = max(most[r], weight);
      }
    }
    const Floats largest_weights = largest_of_each(most);
    alignas(64) float inverse[kLanes];
    store(inverse, select(greater(largest_weights, zeros()), broadcast(255.f) / largest_weights, zeros()));
    store(p_scale, largest_weights * broadcast(1 / 255.f));
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kChunkPages; ++i) store_u8(p[r] + i * kPage, to_ints(weights[r][i] * broadcast(inverse[r])));
  }
  Sums first_value(Floats) const { return broadcast_int(0); }
  Floats value(Sums sums, int r, Floats faded) const { return fma(to_floats(sums), broadcast(p_scale[r]), faded); }
};

}  // namespace penstock
