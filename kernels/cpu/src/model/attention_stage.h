// The attention of a layer: its query, key and value products, the attention itself, and its output product.
#pragma once
#include "attention/attention.h"
#include "gemm/hadamard.h"
#include "model/attention_plan.h"
#include "model/layer_products.h"
#include "model/step.h"
#include "model/step_buffers.h"
#include "weights/decoder_weights.h"

namespace penstock {

class AttentionStage {
 public:
  AttentionStage(const Spec& spec, const LayerSpec* layers, const Share& share, RankGroup& group,
                 const PositionTables& positions, const KvCache& cache, const KvCache& windows, const Step& step,
                 const StepBuffers& buffers, int last_keeper);

  // Plans the step, and reserves memory for it.
  void prepare(const Team& team);
  // Computes the queries, keys and values of the products' tokens, of a rank those of its heads.
  // `pending`: a norm that is applied to the hidden states first, or null.
  void project(Worker& worker, const Layer& layer, LayerProducts& products, const Norm* pending) const;
  // Stores the keys and values in the cache, and attends. `products`: those of the tokens whose output is added.
  void attend(Worker& worker, const Layer& layer, LayerProducts& products) const;
  // Adds the output of the attention to the hidden state.
  void add_output(Worker& worker, const Layer& layer, LayerProducts& products) const;

 private:
  struct RowInputs;

  // The heads of a layer, as this rank computes them. Layers with equal heads share them, and how a step is cut.
  struct Heads {
    int count, group, dim;  // key/value heads of this rank, query heads of each, and their size
    int first;              // the first of these key/value heads. They are counted from 0, as in the cache.
    int total;              // key/value heads of all ranks
    // Of queries and keys whose cache is int8: a few channels of a key are far larger than the others.
    HadamardRotation rotation;
    AttentionPlan plan;
    std::vector<char> is_wanted;  // by tile: whether it has a head token

    int query_of(int head, int row) const { return (first + head) * group + row % group; }
    int num_items() const { return (int)plan.tiles.size() * count; }
  };
  const Heads& heads_of(const Layer& layer) const { return heads_[heads_of_layer_[layer.index]]; }

  // The keys and values that a layer reads: its own, or those of the layer that it names.
  const KvLayer& cells_of(const Layer& layer) const {
    return (layer.spec.is_windowed ? windows_ : cache_).layer(layer.keys_of());
  }

  // An item is a tile and a key/value head. Those of a head follow one another if the team spans NUMA nodes.
  struct Item {
    int tile, head;
  };
  Item item(const Heads& heads, int i) const { return item_of(heads, i, (int)heads.plan.tiles.size()); }
  Item item_of(const Heads& heads, int i, int count) const {
    if (by_head_) return {i % count, i / count};
    return {i / heads.count, i % heads.count};
  }
  void set_head_gates(const Layer& layer, int token) const;
  void store_all(Worker& worker, const Layer& layer) const;
  void store_key_value(const Layer& layer, int token, int head) const;
  void norm_all_heads(Worker& worker, const Layer& layer, const RowBuffer& unnormed) const;
  void prepare_head(const Layer& layer, const float* x, const Buffer<float>& norm, int position, float* out) const;
  int slot_of(const Layer& layer, int token) const;
  bool begins_last_page(int token) const;
  // Whether a layer attends for a tile. Behind the last layer that keeps something, only head tokens matter.
  bool attends_for(const Layer& layer, int tile) const {
    return layer.index <= last_keeper_ || heads_of(layer).is_wanted[tile];
  }
  void find_wanted(Heads& heads) const;
  // Whether what a tile attends to becomes inputs of the output product at once.
  bool sets_inputs(const Layer& layer, const LayerProducts& products) const;
  void attend_by_span(Worker& worker, const Layer& layer, LayerProducts& products) const;
  void attend_tile(const Layer& layer, int i, LayerProducts& products) const;
  int token_of(const Heads& heads, const QueryTile& tile, int row) const;
  Context context_of(const QueryTile& tile, const Layer& layer, int head) const;
  QueryRows query_rows(const QueryTile& tile, const Layer& layer, int head, RowInputs& inputs) const;
  void write_rows(const Layer& layer, const QueryTile& tile, int head, RowState* states, LayerProducts& products) const;
  void write_row(const Layer& layer, int token, int query, RowState& state, float* out) const;

  const Spec& spec_;
  RankGroup& group_;
  const int biases_stride_;
  const PositionTables& positions_;
  const KvCache &cache_, &windows_;
  const Step& step_;
  const StepBuffers& buffers_;
  const int last_keeper_;            // the last layer with keys and values of its own, or with a state
  std::vector<Heads> heads_;         // the different ones
  std::vector<int> heads_of_layer_;  // by layer: the index of its heads; -1 without attention
  bool by_head_ = false;
  Buffer<RowState> partials_;  // [spans][key/value heads][kMaxQueryRows]
};

}  // namespace penstock
