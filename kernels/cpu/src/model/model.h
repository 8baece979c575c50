// A decoder, as penstock.gpu_node.model.architecture.spec describes it: its weights, its KV cache and its steps.
#pragma once
#include <array>
#include <vector>

#include "gemm/activations.h"
#include "attention/attention.h"
#include "gemm/fill.h"
#include "attention/kv_cache.h"
#include "gemm/low_rank.h"
#include "model/norm.h"
#include "sampling/sampler.h"
#include "threads/team.h"
#include "model/weights.h"

namespace penstock {

enum class Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

struct Spec {
  int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, max_position;
  float norm_eps;
  int32_t block_size, num_blocks, kv_format;
  // Whether the hidden state and the gated products are Hadamard-rotated (hadamard.h). The norms then have no
  // weights: these are multiplied into the matrices.
  int32_t turned;
  int32_t rotary_dim;  // channels of a head that RoPE rotates; 0: scores have position biases instead
  int32_t activation;
  // Layer norms instead of RMS norms; a gated MLP; an MLP that reads the same input as the attention.
  int32_t has_layer_norms, is_gated, is_parallel;

  int queries() const { return num_heads * head_dim; }
  int group() const { return num_heads / num_kv_heads; }
};

struct Norm {
  Buffer<float> weight;
  Buffer<float> bias;  // of layer norms
};

struct Layer {
  Norm attention_norm, mlp_norm;
  Buffer<float> q_norm, k_norm;  // RMS norms of heads, or empty
  Matrix qkv;                    // queries, keys, values
  Matrix out;
  Matrix mlp_in;  // gate and up projections, interleaved by half panels if the MLP is gated
  Matrix mlp_out;
  int window = 0;  // tokens that each token attends to, itself included; 0: all
};

// One step, as penstock.gpu_node.model.protocol.StepPlan describes it. The caller keeps the arrays until the step
// ends.
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
  const int32_t* adapters;  // by sequence: the slot of its adapter, -1 for none; null if none has one
  int32_t num_copies;
  const int32_t* copies;  // [num_copies, 2]: block copies, run in order before everything else
  int32_t* tokens;  // out: [num_samples]
  float* logits;    // out, may be null: [num_tokens, vocab]; if set, no token is sampled
  float* times_ms;  // out: [3]: duration of the forward pass, of sampling and of the copies
  const int32_t* num_logprobs;  // by row, negative for none; null if no row wants any
  int32_t* logprob_ids;         // out: [num_samples, logprobs_width], as logprobs.h writes them
  float* logprobs;
  int32_t logprobs_width;
  int32_t num_scored;
  const int32_t *scored_tokens, *score_targets, *num_score_logprobs;  // [num_scored]; a target follows its token
  int32_t* score_ids;  // out: [num_scored, scores_width]
  float* scores;
  int32_t scores_width;
};

// Inputs of a layer's matrices: the normed hidden state, the output of the attention, the gated product.
enum Input { kNormed = 0, kAttended = 1, kGated = 2 };
constexpr int kNumInputs = 3;
using Inputs = std::array<std::array<Activations, kNumFormats>, kNumInputs>;

// Query rows of one sequence that attend together: [first_row, first_row + rows). A row is token * group + query
// head.
struct QueryTile {
  int seq, first_row, rows, context;
};

enum class Slot : int { kQkv = 0, kOut = 1, kMlpIn = 2, kMlpOut = 3, kEmbedding = 4, kHead = 5 };
constexpr int kLayerSlots = 4;

// What an adapter adds to the matrices of one layer.
using AdaptedLayer = std::array<LowRank, kLayerSlots>;

// Per-row inputs of a tile; see QueryRows.
struct RowInputs {
  alignas(64) float queries[kMaxQueryRows * kMaxHeadDim];
  int limits[kMaxQueryRows], firsts[kMaxQueryRows];
  const float* biases[kMaxQueryRows];
};

class Model {
 public:
  // `cores`: see Team.
  Model(const Spec& spec, int num_threads, const int32_t* cores);
  // Finishes a step that is still running, while all members that it uses still exist.
  ~Model() { team_.join(); }

  const Spec& spec() const { return spec_; }
  Team& team() { return team_; }
  Layer& layer(int i) { return layers_[i]; }
  const KvCache& cache() const { return cache_; }
  Matrix& matrix(Slot slot, int layer);

  // Packs rows of a checkpoint. `gains`: the weights of the norm before the matrix if the model is rotated, else
  // null.
  void fill(Slot slot, int layer, const Part& part, const float* gains);
  // Sets a matrix's biases from row `first` of a part on. Biases that are never set stay zero.
  void set_bias(Slot slot, int layer, Place place, int first, const float* values, int count);

  // Sets what the adapter in slot `place` adds to a layer's matrix, whose rows must all be packed. Without parts the
  // adapter adds nothing.
  void set_adapter(int place, int layer, Slot slot, const LowRankPart* parts, int num_parts, const float* gains);

  Norm final_norm;
  Buffer<float> cos, sin;  // [max_position, rotary_dim / 2]
  Buffer<float> position_biases;  // [num_heads, max_position rounded up to whole chunks], without RoPE
  Matrix head;
  Matrix embedding;  // no rows if the head's matrix serves as embedding (tied weights)

  // Starts a step on the team. `wait` must be called before the next one.
  void start(const Plan& plan);
  // Returns when the step is done: the number of threads that computed it.
  int wait() {
    const int active = team_.active();
    team_.join();
    return active;
  }

 private:
  struct Best {
    float value;
    int32_t token;
    bool finite;
  };

  WeightTransform transform_of(Slot slot, const float* gains) const;
  void plan_head();
  void plan_attention();
  void reserve();
  void reserve_head();
  void run(Worker& worker);
  void embed(Worker& worker);
  void run_layer(Worker& worker, int index);
  void run_tail(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs);
  void add_attended(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs);
  void add_mlp(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs);
  void add_product(Worker& worker, const Activations& left, int index, Slot slot, const std::vector<int>& rows);
  const LowRank* low_rank(int token, int index, Slot slot) const;
  void shrink(int row, int token, int index, Slot slot, const float* x);
  void expand(int first, int count, const std::vector<int>& rows, int index, Slot slot, int panel, float* out) const;
  bool repeats(int rows) const;
  void activate(const float* inner, int panel, float* row) const;
  void attend_all(Worker& worker, int layer);
  void attend_by_span(Worker& worker, int layer);
  void attend_tile(int layer, int item);
  void store_key_value(int layer, int token, int head);
  void place_head(const float* x, const Buffer<float>& norm, int position, float* out) const;
  Context context_of(const QueryTile& tile, int layer, int head) const;
  QueryRows query_rows(const QueryTile& tile, int layer, int head, RowInputs& inputs) const;
  void write_rows(const QueryTile& tile, int head, const RowState* states);
  const float* normed(int token, const Norm& norm, bool* finite) const;
  void project_head(Worker& worker);
  void note_logits(Worker& worker, int first, int rows, int panel, float* out);
  void choose(Worker& worker);
  int32_t choose_one(int row);
  bool wants_logprobs(int row) const { return plan_.num_logprobs && plan_.num_logprobs[row] >= 0; }
  void score(Worker& worker);
  void await_masks(Worker& worker) const;
  int32_t best_of_threads(int row) const;
  SamplingRule rule(int row) const;

  bool keeps_logits(int row) const { return logits_row_[row] >= 0; }
  float* logits_of(int row) const { return logits_.data() + (size_t)logits_row_[row] * logits_stride_; }
  float* hidden_row(int row) const { return hidden_.data() + (size_t)row * hidden_stride_; }
  float* qkv_row(int row) const { return qkv_.data() + (size_t)row * qkv_stride_; }
  float* attended_row(int row) const { return attended_.data() + (size_t)row * attended_stride_; }
  float* gated_row(int row) const { return gated_.data() + (size_t)row * gated_stride_; }
  float* inner_row(int row) const { return inner_.data() + (size_t)row * inner_stride_; }
  int slot_of(int token) const;
  bool begins_last_page(int token) const;
  int first_seen(int position, int layer) const;

  const Spec spec_;
  Team team_;
  std::vector<Layer> layers_;
  std::vector<std::vector<AdaptedLayer>> adapters_;  // [adapter slots][layers]
  const KvCache cache_;
  const HadamardRotation hidden_rotation_, gated_rotation_;
  const int hidden_stride_, qkv_stride_, attended_stride_, gated_stride_, logits_stride_, biases_stride_;

  Plan plan_{};
  int inner_stride_ = 0;  // largest rank of any adapter's matrix so far
  bool decodes_only_ = false;
  bool fills_block_ = false;
  bool splits_spans_ = false;
  std::vector<int> seq_of_token_;
  std::vector<int> store_runs_;  // first token of each run that one thread must store (kTokensPerWord), then the end
  std::vector<QueryTile> tiles_;
  std::vector<int> span_starts_;  // index of each tile's first span among all spans
  std::vector<int> all_tokens_;
  std::vector<int> head_tokens_;  // tokens whose logits are needed; those that are only scored come last
  int num_chosen_ = 0;            // head tokens that are sampled or return their logits
  std::vector<int> logits_row_;   // by head token: its row of logits_; -1 if only the best logit is kept
  std::vector<Best> bests_;       // [threads][head tokens]
  std::vector<char> poisoned_;    // by head token: whether its hidden state is not finite
  Buffer<float> hidden_, qkv_, attended_, gated_, logits_;
  Buffer<float> inner_;  // low-rank values of the current product, [rows][inner_stride]
  Buffer<RowState> partials_;
  // One per thread; all but the first hold only a few rows.
  std::vector<Inputs> inputs_, last_inputs_;  // `last`: for the last layer's rows after its attention
  Activations head_in_, scored_in_;
  Buffer<float> scored_logits_;
};

}  // namespace penstock
