// A decoder or an encoder: its weights, its KV cache and its steps.
#pragma once
#include "attention/kv_cache.h"
#include "model/attention_stage.h"
#include "model/expert_stage.h"
#include "model/head_stage.h"
#include "model/hidden_stage.h"
#include "model/layer_products.h"
#include "model/mlp_stage.h"
#include "model/recurrent_stage.h"
#include "model/score_stage.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "model/token_stage.h"
#include "ranks/group.h"
#include "ranks/share.h"
#include "threads/team.h"
#include "weights/adapters.h"
#include "weights/decoder_weights.h"
#include "weights/spec.h"

namespace penstock {

class Model {
 public:
  // layers: [spec.num_layers]. `cores`: see Team.
  Model(const Spec& spec, const LayerSpec* layers, int num_threads, const int32_t* cores);
  // Finishes a step that is still running, while all members that it uses still exist.
  ~Model() { team_.join(); }

  Team& team() { return team_; }
  // Sets the NUMA node of each thread's core. No step may have run.
  void set_nodes(const int32_t* nodes) {
    team_.set_nodes(nodes);
    if (!team_.spans_nodes()) return;
    cache_.use_small_pages();
    windows_.use_small_pages();
  }
  DecoderWeights& weights() { return weights_; }

  // Sets what the adapter in a slot adds to a layer's matrix, whose rows must all be packed. Without parts the adapter
  // adds nothing. `gains`: as for DecoderWeights::fill.
  void set_adapter(int adapter_slot, int layer, Slot matrix, const LowRankPart* parts, int num_parts,
                   const float* gains);

  // The panels of a layer's matrix that this rank multiplies with. With experts: of each of them, in their order.
  std::vector<int32_t> rank_panels(int layer, Slot slot) const;

  // The ranks that compute each step together. All of them start the same steps in the same order.
  RankGroup& group() { return group_; }
  // Returns how much memory the ranks must share for a step. No step may be running.
  size_t shared_bytes(const Plan& plan);

  // Starts a step on the team. `wait` must be called before the next one.
  void start(const Plan& plan);
  // Returns when the step is done: the number of threads that computed it. `group().ending()` then says whether all
  // ranks have computed it.
  int wait();

 private:
  // Behind the last layer that keeps something of each token, only tokens whose logits are needed matter.
  LayerProducts& products_before_attention(const Layer& layer) {
    return layer.index <= last_keeper_ ? products_ : last_products_;
  }
  LayerProducts& products_after_attention(const Layer& layer) {
    return layer.index < last_keeper_ ? products_ : last_products_;
  }
  void plan(const Plan& plan);
  void place(Arena& arena);
  void prepare();
  void run(Worker& worker);
  void copy_blocks(Worker& worker, const KvCache& cache, const int32_t* copies, int count) const;
  void embed(Worker& worker);
  void compute(Worker& worker);
  const Norm* run_layer(Worker& worker, const Layer& layer, const Norm* pending);
  const Norm* norm_sums(Worker& worker, const Norm& norm, const LayerProducts& products, bool has_next_product) const;
  void run_mlp(Worker& worker, const Layer& layer, LayerProducts& products, const Norm* pending);

  const Spec spec_;
  const Share share_;
  const int last_keeper_;  // the last layer with keys and values of its own, or with a state
  RankGroup group_;
  Team team_;
  DecoderWeights weights_;
  const KvCache cache_, windows_;  // layers with windows are in the second one, if they have blocks of their own.
  Adapters adapters_;
  Step step_;
  StepBuffers buffers_;
  LayerProducts products_;       // of all tokens
  LayerProducts last_products_;  // of the head's tokens, after the last attention
  TokenStage tokens_;
  AttentionStage attention_;
  RecurrentStage recurrent_;
  MlpStage mlp_;
  ExpertStage experts_;
  HeadStage head_;
  ScoreStage scores_;
  HiddenStage states_;
};

}  // namespace penstock
