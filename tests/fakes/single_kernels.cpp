// Single kernels, which tests call through ctypes. Matrices come as rows of a source format, numbers as plain rows.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "gemm/gemm.h"
#include "gemm/hadamard.h"
#include "gemm/low_rank.h"
#include "sampling/logprobs.h"
#include "sampling/sampler.h"
#include "weights/norm.h"

using namespace penstock;

namespace {

// Packs rows as a model does: panel by panel, from row `first` of the matrix on.
void pack(Matrix& matrix, int source, int first, int rows, const uint8_t* data, size_t row_bytes) {
  const Part part{(Source)source, RowLayout::kPlain, first, rows, data, row_bytes, nullptr};
  const PanelRange panels = panels_of(part);
  for (int i = panels.begin; i < panels.end; ++i) matrix.set_rows(i, part);
}

Matrix packed(int format, int source, int rows, int columns, const uint8_t* data, size_t row_bytes) {
  Matrix matrix({{(Format)format, rows}}, columns);
  pack(matrix, source, 0, rows, data, row_bytes);
  return matrix;
}

// Applies a vector kernel to any number of values.
template <class Function>
void map(const float* x, int count, float* out, const Function& function) {
  for (int i = 0; i < count; i += kLanes) {
    float lanes[kLanes] = {};
    const int n = std::min(kLanes, count - i);
    std::copy_n(x + i, n, lanes);
    store(lanes, function(load(lanes)));
    std::copy_n(lanes, n, out + i);
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Packs rows and reads them back as the kernels see them. out: [rows, columns].
void penstock_single_repack(int format, int source, int rows, int columns, const uint8_t* data, size_t row_bytes,
                            float* out) {
  const Matrix matrix = packed(format, source, rows, columns, data, row_bytes);
  for (int i = 0; i < rows; ++i) matrix.get_row(i, out + (size_t)i * columns);
}

// Adds to out, [rows, outputs], what parts of an adapter compute from x, [rows, columns].
void penstock_single_low_rank(int outputs, int columns, const LowRankPart* parts, int num_parts, const float* x,
                              int rows, float* out) {
  const Matrix matrix({{Format::kBf16, outputs}}, columns);
  const LowRank low(parts, num_parts, outputs, columns, {nullptr, nullptr, nullptr});
  std::vector<float> padded(matrix.padded_columns()), inner(low.rank()), panel(kPanel);
  for (int r = 0; r < rows; ++r) {
    std::copy_n(x + (size_t)r * columns, columns, padded.data());
    low.shrink(padded.data(), inner.data());
    for (int p = 0; p < matrix.num_panels(); ++p) {
      float* some = out + (size_t)r * outputs + p * kPanel;
      const int width = std::min(kPanel, outputs - p * kPanel);
      std::copy_n(some, width, panel.data());
      low.expand(inner.data(), p, panel.data());
      std::copy_n(panel.data(), width, some);
    }
  }
}

size_t penstock_single_num_bytes(int format, int rows, int columns) {
  return Matrix({{(Format)format, rows}}, columns).num_bytes();
}

// A matrix of parts, one below the other: rows of a format, packed from rows of a source.
struct MatrixPart {
  int32_t format, source, rows;
  const uint8_t* data;
  size_t row_bytes;
};

// x: [rows, columns], out: [rows, outputs of all parts].
void penstock_single_multiply(const MatrixPart* parts, int num_parts, int columns, const float* x, int rows,
                              int num_threads, float* out) {
  std::vector<Run> runs;
  for (int i = 0; i < num_parts; ++i) runs.push_back({(Format)parts[i].format, parts[i].rows});
  Matrix matrix(runs, columns);
  int next = 0;
  for (int i = 0; i < num_parts; ++i) {
    pack(matrix, parts[i].source, next, parts[i].rows, parts[i].data, parts[i].row_bytes);
    next += parts[i].rows;
  }
  Activations left;
  left.prepare(rows, matrix);
  Team team(num_threads);
  team.start([&](Worker& worker) {
    worker.for_each(rows, [&](int i) {
      std::vector<float> padded(matrix.padded_columns());
      std::copy_n(x + (size_t)i * columns, columns, padded.data());
      left.set_row(i, padded.data());
    });
    multiply(worker, left, matrix, AllPanels{matrix.num_panels()},
             [&](int first, int count, int panel, const float* products) {
               const int begin = panel * kPanel, width = std::min(kPanel, matrix.rows - begin);
               for (int r = 0; r < count; ++r) {
                 std::copy_n(products + r * kPanel, width, out + (size_t)(first + r) * matrix.rows + begin);
               }
             });
  });
  team.join();
}

float penstock_single_quantize(const float* values, int count, int8_t* q, int32_t* sum) {
  return quantize_row(values, count, q, sum);
}

void penstock_single_exp(const float* x, int count, float* out) {
  map(x, count, out, [](Floats v) { return exp_of_negative(v); });
}

void penstock_single_silu(const float* x, int count, float* out) {
  map(x, count, out, [](Floats v) { return silu(v); });
}

void penstock_single_gelu(const float* x, int count, int is_tanh, float* out) {
  map(x, count, out, [=](Floats v) { return is_tanh ? gelu_tanh(v) : gelu(v); });
}

// Norms a row: layer norm with a bias, RMS norm without. All arrays: [padded], zero from `count` on.
int penstock_single_norm(const float* x, const float* weight, const float* bias, int padded, int count, float eps,
                         float* out) {
  return bias ? layer_norm(x, weight, bias, padded, count, eps, out) : rms_norm(x, weight, padded, count, eps, out);
}

// Rotates a row in place. row: [count], padded to whole vectors.
void penstock_single_hadamard(float* row, int count) { HadamardRotation(count).apply(row, row); }

int penstock_single_packed_row(int layout, int first, int i) { return packed_row((RowLayout)layout, first, i); }

// Samples at `count` positions, from the rule's own on, each from the same logits.
void penstock_single_draw(const float* logits, int vocab, const SamplingRule* rule, int count, int32_t* tokens) {
  SamplingRule next = *rule;
  for (int i = 0; i < count; ++i, ++next.position) {
    std::vector<float> row(logits, logits + vocab);
    tokens[i] = sample(row.data(), vocab, next);
  }
}

void penstock_single_logprobs(const float* logits, int vocab, int32_t token, int count, int32_t* ids, float* values) {
  write_logprobs(logits, vocab, token, count, ids, values);
}

KvCache* penstock_single_cache_new(int format, int num_heads, int head_dim, int block_size, int num_blocks) {
  return new KvCache(std::vector<KvShape>{{(KvFormat)format, num_heads, head_dim, block_size}}, num_blocks);
}

void penstock_single_cache_free(KvCache* cache) { delete cache; }

// keys, values: [count, head_dim], one of each for a slot.
void penstock_single_cache_set(KvCache* cache, const int* slots, int count, int head, const float* keys,
                               const float* values) {
  const size_t dim = cache->layer(0).shape().head_dim;
  for (int i = 0; i < count; ++i) cache->layer(0).set(slots[i], head, keys + i * dim, values + i * dim);
}

void penstock_single_cache_get(KvCache* cache, const int* slots, int count, int head, float* keys, float* values) {
  const size_t dim = cache->layer(0).shape().head_dim;
  for (int i = 0; i < count; ++i) cache->layer(0).get(slots[i], head, keys + i * dim, values + i * dim);
}

// queries, out: [count, head_dim]; limits, firsts: [count]; biases: [count] rows or null. `by_span`: computes the
// spans separately, in reverse order, and merges them; else all in one call.
void penstock_single_attend(const KvCache* cache, const float* queries, const int* limits, const int* firsts,
                            const float* const* biases, int count, const int32_t* block_table, int head, float scale,
                            int by_span, float* out) {
  const int dim = cache->layer(0).shape().head_dim, end = *std::max_element(limits, limits + count);
  const int first_chunk = *std::min_element(firsts, firsts + count) / kChunk * kChunk;
  const QueryRows rows{queries, limits, firsts, biases, count, block_table, head, scale, 0, first_chunk, {}};
  std::vector<RowState> states((size_t)num_spans(end) * count);
  if (by_span) {
    for (int span = num_spans(end) - 1; span >= 0; --span) {
      attend_span(cache->layer(0), rows, span * kSpan, std::min(end, (span + 1) * kSpan),
                  &states[(size_t)span * count]);
    }
    for (int span = 1; span < num_spans(end); ++span)
      for (int r = 0; r < count; ++r) merge(states[r], states[(size_t)span * count + r], dim);
  } else {
    attend(cache->layer(0), rows, end, states.data());
  }
  for (int r = 0; r < count; ++r) finish(states[r], dim, out + (size_t)r * dim);
}

size_t penstock_sizeof_sampling_rule() { return sizeof(SamplingRule); }

}  // extern "C"
#pragma GCC visibility pop
