// One step, as penstock.gpu_node.model.protocol.StepPlan describes it. The caller keeps the arrays until the step
// ends.
#pragma once
#include <cstdint>

namespace penstock {

struct Plan {
  int32_t num_tokens, num_seqs, num_samples, block_table_stride;
  const int32_t *token_ids, *positions, *query_starts, *block_tables, *sample_tokens;
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int32_t *top_k, *choice, *position;
  const uint64_t* seed;
  // Null if no row has any.
  const int32_t* const* seen;
  const int32_t *num_seen, *num_seen_prompt;
  const int32_t* const* banned;
  const int32_t* num_banned;
  const int32_t* const* biased;
  const float* const* biases;
  const int32_t* num_biased;
  const uint32_t* const* masks;  // by row; null if the row may choose any token
  const int32_t* masks_written;  // not 0 once all masks are written; other threads write them during the step
  const int32_t* adapters;       // by sequence: the slot of its adapter, -1 for none; null if none has one
  int32_t num_copies;
  const int32_t* copies;  // [num_copies, 2]: block copies, run in order before everything else
  int32_t* tokens;        // out: [num_samples]
  // Out, may be null: [num_tokens, vocab]; if set, no token is sampled. On a rank that does not lead it only tells that
  // the rank that leads has one.
  float* logits;
  float* times_ms;              // out: [3]: duration of the forward pass, of sampling and of the copies
  const int32_t* num_logprobs;  // by row, negative for none; null if no row wants any
  int32_t* logprob_ids;         // out: [num_samples, logprobs_width], as logprobs.h writes them
  float* logprobs;
  int32_t logprobs_width;
  int32_t num_scored;
  const int32_t *scored_tokens, *score_targets, *num_score_logprobs;  // [num_scored]; a target follows its token
  int32_t* score_ids;                                                 // out: [num_scored, scores_width]
  float* scores;
  int32_t scores_width;
  int32_t num_pooled;
  const int32_t* pooled_tokens;  // [num_pooled]: tokens whose hidden state after the final norm is wanted
  float* hidden;                 // out: [num_pooled, hidden]
  // Of a model with recurrent layers: by sequence, the state slot before its first token, negative for zeros, and the
  // one that gets the state after its last token.
  const int32_t *state_reads, *state_writes;
  const int32_t* state_saves;  // [num_saves, 2]: a token, ascending, and the slot that gets the state after it
  int32_t num_saves;
  // In and out: [num_tokens, layers * token_size]: the tokens' embeddings for each layer; null if there are none.
  float* token_inputs;
  const int32_t* token_types;  // of an encoder with embeddings of types: [num_tokens]
  // Of a model whose layers with windows have blocks of their own. The tables are as wide as the others; entries behind
  // a window are 0.
  const int32_t *window_tables, *window_copies;
  int32_t num_window_copies;
};

}  // namespace penstock
