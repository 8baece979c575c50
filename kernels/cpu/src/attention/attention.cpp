#include "attention/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "attention/attention_chunk.h"

namespace penstock {
namespace {

// The score of a masked token. It is finite, so that the difference of two such scores is not NaN.
constexpr float kMasked = -1e30f;
// Pages whose scores are computed in one pass over the queries.
constexpr int kPagesAtOnce = kRegisters >= 32 ? kChunkPages : 2;

// Attention of R rows over the chunks of a span, one chunk after the other. D: head_dim, or 0 if known only at run
// time.
template <template <int, int> class Cache, int R, int D>
class Span {
  using Own = Cache<R, D>;
  using Sums = typename Own::Sums;
  using Part = decltype(Own::part(nullptr));
  static constexpr int kPartBytes = kLine / Own::kParts, kPerLine = Own::kPerPart * Own::kParts;
  static constexpr int kVectors = (D ? D : kMaxHeadDim) / kLanes;

 public:
  Span(const KvLayer& kv, const QueryRows& rows)
      : kv_(kv), rows_(rows), dim_(D ? D : kv.shape().head_dim), own_(rows, dim_) {
    store(top_, broadcast(kMasked));
    for (int r = 0; r < R; ++r) {
      total_[r] = zeros();
      for (int j = 0; j < dim_ / kLanes; ++j) acc_[r][j] = zeros();
    }
    first_limit_ = *std::min_element(rows.limits, rows.limits + R);
    last_first_ = *std::max_element(rows.firsts, rows.firsts + R);
  }

  // Attends to the chunk that begins at token `at`, and prefetches the next one.
  void see(const Chunk& chunk, const Chunk& next, int at) {
    Fetcher fetcher(next, kv_.shape().cell_bytes());
    Floats s[R][kChunkPages];
    if (kPagesAtOnce == kChunkPages && chunk.count > 2) {
      scores<kPagesAtOnce>(chunk, fetcher, 0, s);
    } else {
      scores<2>(chunk, fetcher, 0, s);
      if (chunk.count > 2) {
        scores<2>(chunk, fetcher, 2, s);
      } else {
        for (int r = 0; r < R; ++r) s[r][2] = s[r][3] = broadcast(kMasked);
      }
    }
    if (rows_.cap != 0) cap_scores(s);
    if (rows_.biases) add_biases(at, s);
    const bool masks = at + kChunk > first_limit_ || at < last_first_;
    if (masks) mask(at, kMasked, s);
    weigh(s, fetcher);
    if (masks) mask(at, 0, s);
    for (int r = 0; r < R; ++r) {
      total_[r] = total_[r] * broadcast(fade_[r]);
      for (int i = 0; i < kChunkPages; ++i) total_[r] = total_[r] + s[r][i];
    }
    own_.set_weights(kv_, chunk, s);
    add_values(chunk, fetcher);
  }

  void finish(RowState* out) {
    for (int r = 0; r < R; ++r) {
      out[r].total = sum(total_[r]);
      out[r].largest = top_[r];
      for (int j = 0; j < dim_ / kLanes; ++j) store(out[r].values + j * kLanes, acc_[r][j]);
    }
  }

 private:
  // Computes the scores of all rows against the pages [first, first + P), sixteen tokens a vector.
  template <int P>
  void scores(const Chunk& chunk, Fetcher& fetcher, int first, Floats (&s)[R][kChunkPages]) {
    if constexpr (Own::kGroup == 0) {
      add_scores<P>(chunk, fetcher, first, 0, 0, dim_, s);
    } else {
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < P; ++i) s[r][first + i] = zeros();
      for (int g = 0, d = 0; d < dim_; ++g, d += Own::kGroup) {
        add_scores<P>(chunk, fetcher, first, g, d, std::min(d + Own::kGroup, dim_), s);
      }
    }
  }

  // Computes the scores over the channels [begin, end). Those of a group are added to `s`; without groups, `s` is set.
  template <int P>
  void add_scores(const Chunk& chunk, Fetcher& fetcher, int first, int group, int begin, int end,
                  Floats (&s)[R][kChunkPages]) {
    const uint8_t* keys[P];
    for (int i = 0; i < P; ++i) keys[i] = chunk.cells[first + i];
    Sums acc[R][P];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < P; ++i) acc[r][i] = own_.first_score(r, group);
#pragma GCC unroll 1
    for (int k = begin / kPerLine; k < end / kPerLine; ++k) {
      Fetcher::ask(fetcher, Fetcher::kWithKeys);
      for (int h = 0; h < Own::kParts; ++h) {
        Part page[P];
        for (int i = 0; i < P; ++i) page[i] = Own::part(keys[i] + k * kLine + h * kPartBytes);
        for (int r = 0; r < R; ++r) {
          const Part query = Own::factor(own_.q[r] + k * kPerLine + h * Own::kPerPart);
          for (int i = 0; i < P; ++i) acc[r][i] = Own::dot_keys(acc[r][i], page[i], query);
        }
      }
    }
    for (int i = 0; i < P; ++i) {
      const Floats scales = own_.scales_of(kv_, chunk.cells[first + i], group);
      for (int r = 0; r < R; ++r) s[r][first + i] = own_.score(acc[r][i], r, group, scales, s[r][first + i]);
    }
  }

  // Scores are logarithms to base 2 of the weights.
  void cap_scores(Floats (&s)[R][kChunkPages]) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kChunkPages; ++i) s[r][i] = capped(s[r][i], rows_.cap * kLog2E);
  }

  void add_biases(int at, Floats (&s)[R][kChunkPages]) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kChunkPages; ++i) {
        s[r][i] = fma(load(rows_.biases[r] + at + i * kPage), broadcast(kLog2E), s[r][i]);
      }
  }

  // Writes `hidden` for the tokens that a row does not see.
  void mask(int at, float hidden, Floats (&s)[R][kChunkPages]) {
    for (int i = 0; i < kChunkPages; ++i) {
      const Ints tokens = lane_numbers() + broadcast_int(at + i * kPage);
      for (int r = 0; r < R; ++r) {
        s[r][i] = select(less(tokens, broadcast_int(rows_.limits[r])), s[r][i], broadcast(hidden));
        s[r][i] = select(less(tokens, broadcast_int(rows_.firsts[r])), broadcast(hidden), s[r][i]);
      }
    }
  }

  // Turns scores into weights relative to the largest score so far. Sets fade_, the factor for earlier results: when
  // the largest score grows, they lose weight.
  void weigh(Floats (&s)[R][kChunkPages], Fetcher& fetcher) {
    Floats most[R];
    for (int r = 0; r < R; ++r) most[r] = max(max(s[r][0], s[r][1]), max(s[r][2], s[r][3]));
    const Floats before = load(top_), top = max(largest_of_each(most), before);
    store(fade_, exp2_of_negative(before - top));
    store(top_, top);
#pragma GCC unroll 1
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < kChunkPages; ++i) s[r][i] = exp2_of_negative(s[r][i] - broadcast(top_[r]));
      Fetcher::ask(fetcher, Fetcher::kWithWeights * kChunkPages);
    }
  }

  void add_values(const Chunk& chunk, Fetcher& fetcher) {
    Sums sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < dim_ / kLanes; ++j) sums[r][j] = own_.first_value(acc_[r][j] * broadcast(fade_[r]));
    for (int i = 0; i < chunk.count; ++i) {
      const uint8_t* values = kv_.values(chunk.cells[i]);
      for (int t = 0; t < kPage; t += Own::kPerPart, values += dim_ / kLanes * kPartBytes) {
        Part weights[R];
        for (int r = 0; r < R; ++r) weights[r] = Own::factor(own_.p[r] + i * kPage + t);
        for (int j = 0; j < dim_ / kLanes; ++j) {
          if (t % kPerLine == 0) Fetcher::ask(fetcher, Fetcher::kWithValues);
          const Part v = Own::part(values + j * kPartBytes);
          for (int r = 0; r < R; ++r) sums[r][j] = Own::dot_values(sums[r][j], v, weights[r]);
        }
      }
    }
    Fetcher::ask_rest(fetcher);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < dim_ / kLanes; ++j) {
        acc_[r][j] = own_.value(sums[r][j], r, acc_[r][j] * broadcast(fade_[r]));
      }
  }

  const KvLayer& kv_;
  const QueryRows& rows_;
  const int dim_;
  int first_limit_, last_first_;
  Own own_;
  alignas(64) float top_[kLanes], fade_[kLanes];
  Floats total_[R], acc_[R][kVectors];
};

template <template <int, int> class Cache, int R, int D>
void run_span(const KvLayer& kv, const QueryRows& rows, int begin, int end, const Chunk& after, RowState* out) {
  Span<Cache, R, D> span(kv, rows);
  const Context own{rows.block_table, rows.head, begin, end};
  Chunk chunk(kv, own, begin);
  for (int at = begin; at < end; at += kChunk) {
    const Chunk next = at + kChunk < end ? Chunk(kv, own, at + kChunk) : after;
    span.see(chunk, next, at);
    chunk = next;
  }
  span.finish(out);
}

using SpanKernel = void (*)(const KvLayer&, const QueryRows&, int, int, const Chunk&, RowState*);

template <template <int, int> class Cache, int D, int... R>
constexpr std::array<SpanKernel, sizeof...(R)> kernels_of(std::integer_sequence<int, R...>) {
  return {run_span<Cache, R + 1, D>...};
}

template <template <int, int> class Cache, int D>
constexpr auto kKernels = kernels_of<Cache, D>(std::make_integer_sequence<int, kMaxQueryRows>());

template <template <int, int> class Cache>
SpanKernel kernel_of(int head_dim, int rows) {
  switch (head_dim) {
    case 32:
      return kKernels<Cache, 32>[rows - 1];
    case 64:
      return kKernels<Cache, 64>[rows - 1];
    case 128:
      return kKernels<Cache, 128>[rows - 1];
    default:
      return kKernels<Cache, 0>[rows - 1];
  }
}

void run(const KvLayer& cache, const QueryRows& rows, int begin, int end, const Chunk& after, RowState* out) {
  const int dim = cache.shape().head_dim;
  const auto kernel_for = [&](KvFormat format) {
    if (format == KvFormat::kBf16) return kernel_of<Bf16Cache>(dim, rows.count);
    if (format == KvFormat::kF16) return kernel_of<F16Cache>(dim, rows.count);
    return kernel_of<Int8Cache>(dim, rows.count);
  };
  kernel_for(cache.shape().format)(cache, rows, begin, end, after, out);
}

}  // namespace

void attend_span(const KvLayer& cache, const QueryRows& rows, int begin, int end, RowState* out) {
  begin = std::max(begin, rows.first_chunk);
  if (begin >= end) {
    for (int r = 0; r < rows.count; ++r) out[r].total = 0;
    return;
  }
  run(cache, rows, begin, end, Chunk(cache, {rows.block_table, rows.head, begin, end}, begin), out);
}

void merge(RowState& state, const RowState& later, int head_dim) {
  if (later.total == 0) return;
  if (state.total == 0) {
    state = later;
    return;
  }
  const float top = std::max(state.largest, later.largest);
  const float fade = std::exp2(state.largest - top), later_fade = std::exp2(later.largest - top);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Floats faded = load(state.values + d) * broadcast(fade);
    store(state.values + d, fma(load(later.values + d), broadcast(later_fade), faded));
  }
  state.total = state.total * fade + later.total * later_fade;
  state.largest = top;
}

void add_sink(RowState& state, float score, int head_dim) {
  RowState sink;
  std::fill_n(sink.values, head_dim, 0.f);
  sink.total = 1;
  sink.largest = score * kLog2E;
  merge(state, sink, head_dim);
}

void finish(const RowState& state, int head_dim, float* out) {
  const Floats inverse = broadcast(1.f / state.total);
  for (int d = 0; d < head_dim; d += kLanes) store(out + d, load(state.values + d) * inverse);
}

void attend(const KvLayer& cache, const QueryRows& rows, int end, RowState* out) {
  const Context own{rows.block_table, rows.head, rows.first_chunk, end}, &next = rows.next.tokens ? rows.next : own;
  RowState later[kMaxQueryRows];
  for (int begin = own.first, span_end; begin < end; begin = span_end) {
    span_end = std::min(end, (begin / kSpan + 1) * kSpan);
    const bool is_first = begin == own.first;
    const Chunk after = span_end < end ? Chunk(cache, own, span_end) : Chunk(cache, next, next.first);
    run(cache, rows, begin, span_end, after, is_first ? out : later);
    for (int r = 0; !is_first && r < rows.count; ++r) merge(out[r], later[r], cache.shape().head_dim);
  }
}

}  // namespace penstock
