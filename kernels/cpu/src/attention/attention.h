// Attention over a paged KV cache, for a few query rows of one sequence and one key/value head at a time.
//
// The context is cut into spans that start at fixed positions. Each span gives a partial result by an online softmax
// (Milakov and Gimelshein, arXiv:1805.02867). Partial results are merged in the order of their spans. The bits of a
// row therefore depend neither on how threads share its spans, nor on the other rows.
#pragma once
#include "attention/kv_cache.h"

namespace penstock {

constexpr int kMaxQueryRows = 6;
constexpr int kSpan = 512;

// Where to read one head's keys and values of a sequence, from the chunk that begins at token `first`.
struct Context {
  const int32_t* block_table;
  int head, first, tokens;
};

struct QueryRows {
  const float* queries;        // [count][head_dim], after RoPE
  const int* limits;           // [count]: end of the tokens that a row sees, exclusive
  const int* firsts;           // [count]: first token that a row sees
  const float* const* biases;  // [count]: added to the scores of a row, by token, up to whole chunks; may be null
  int count;                   // at most kMaxQueryRows
  const int32_t* block_table;  // of the sequence
  int head;                    // key/value head
  float scale;                 // of the scores
  float cap;                   // of the scores: s becomes cap * tanh(s / cap); 0: none
  int first_chunk;             // start of the first chunk with a token that some row sees; nothing before it is read
  Context next;                // context to prefetch meanwhile: the likely next one of this layer; may be empty
};

// Partial result of a row: weighted values, their total weight, and the largest score as a power of two. Total is 0
// if the row has seen no token.
struct RowState {
  alignas(64) float values[kMaxHeadDim];
  float total, largest;
};

// Tokens that are processed together, with weights quantized together.
constexpr int kChunkPages = 4;
constexpr int kChunk = kChunkPages * kPage;

// Attends to the tokens [begin, end) with begin a multiple of kSpan and end - begin <= kSpan; out: [count].
void attend_span(const KvLayer& cache, const QueryRows& rows, int begin, int end, RowState* out);

// Merges the partial result of a later span into `state`.
void merge(RowState& state, const RowState& later, int head_dim);

// Gives a share of the attention to a score that has no value.
void add_sink(RowState& state, float score, int head_dim);

// Divides the values by their total weight. out: [head_dim].
void finish(const RowState& state, int head_dim, float* out);

// Attends to all spans of [0, end), one after the other; out: [count].
void attend(const KvLayer& cache, const QueryRows& rows, int end, RowState* out);

inline int num_spans(int context) { return (context + kSpan - 1) / kSpan; }

}  // namespace penstock
