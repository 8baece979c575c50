// Causal attention over a paged cache, for a few query rows of one sequence and one key/value head at a time.
//
// The context is cut into spans that start at fixed positions. A span gives a partial result by an online softmax
// (Milakov and Gimelshein, arXiv:1805.02867), and partial results are merged in the order of their spans: the bits of a
// row do not depend on how its spans are shared out over threads, nor on the rows beside it.
#pragma once
#include "attention/kv_cache.h"

namespace penstock {

constexpr int kMaxQueryRows = 6;
constexpr int kSpan = 512;

// Where a head's keys and values of a sequence are, from the chunk on that begins at token `first`.
struct Context {
  const int32_t* block_table;
  int head, first, tokens;
};

struct QueryRows {
  const float* queries;       // [count][head_dim], rotated
  const int* limits;          // [count]: the token that ends what a row sees
  const int* firsts;          // [count]: the token that begins it
  const float* const* biases; // [count]: what a row adds to the score of each token, to whole chunks; may be null
  int count;                  // at most kMaxQueryRows
  const int32_t* block_table; // of the sequence
  int layer, head;            // key/value head
  float scale;                // of the scores
  int first_chunk;            // where the chunk of the first token begins that any row sees: none before it is read
  Context next;               // what is likely attended to next, in the same layer, and fetched meanwhile; may be empty
};

// What a row has seen so far: weighted values, their weight, the largest score in powers of two. Nothing seen: total is 0.
struct RowState {
  alignas(64) float values[kMaxHeadDim];
  float total, largest;
};

// Tokens that are looked at together, and whose weights are quantised together.
constexpr int kChunkPages = 4;
constexpr int kChunk = kChunkPages * kPage;

// Attends to the tokens [begin, end) with begin a multiple of kSpan and end - begin <= kSpan; out: [count].
void attend_span(const KvCache& cache, const QueryRows& rows, int begin, int end, RowState* out);

// Adds what a later span saw.
void merge(RowState& state, const RowState& later, int head_dim);

// out: [head_dim].
void finish(const RowState& state, int head_dim, float* out);

// All spans of [0, end) one after the other; out: [count].
void attend(const KvCache& cache, const QueryRows& rows, int end, RowState* out);

inline int num_spans(int context) { return (context + kSpan - 1) / kSpan; }

}  // namespace penstock
