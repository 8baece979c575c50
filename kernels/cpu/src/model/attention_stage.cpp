#include "model/attention_stage.h"

#include <algorithm>
#include <cmath>

#include "weights/norm.h"

namespace penstock {
namespace {

// Each store prefetches the memory of the store that comes this many later.
constexpr int kStoresAhead = 4;

// Applies RoPE to the pairs (i, i + dim / 2), the order of Hugging Face's checkpoints.
void rotate(const float* x, const float* cos, const float* sin, int dim, float* out) {
  const int half = dim / 2;
  if (half % kLanes == 0) {
    for (int i = 0; i < half; i += kLanes) {
      const Floats a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(out + i, a * c - b * s);
      store(out + half + i, b * c + a * s);
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// values *= sigmoid(gate).
void gate_values(const float* gate, int count, float* values) {
  for (int i = 0; i < count; i += kLanes) store(values + i, gated_by(load(values + i), load(gate + i)));
}

// values *= factor.
void scale_values(float factor, int count, float* values) {
  for (int i = 0; i < count; i += kLanes) store(values + i, load(values + i) * broadcast(factor));
}

// The first token that a token at `position` attends to.
int first_seen(int position, const Layer& layer) {
  return layer.spec.window == 0 ? 0 : std::max(0, position + 1 - layer.spec.window);
}

// The end of the tokens that a token at `position` of an encoder's text attends to.
int end_seen(int position, const Layer& layer, int num_tokens) {
  return layer.spec.window == 0 ? num_tokens : std::min(num_tokens, position + layer.spec.window);
}

}  // namespace

// Per-row inputs of a tile; see QueryRows.
struct AttentionStage::RowInputs {
  alignas(64) float queries[kMaxQueryRows * kMaxHeadDim];
  int limits[kMaxQueryRows], firsts[kMaxQueryRows];
  const float* biases[kMaxQueryRows];
};

AttentionStage::AttentionStage(const Spec& spec, const LayerSpec* layers, const Share& share, RankGroup& group,
                               const PositionTables& positions, const KvCache& cache, const KvCache& windows,
                               const Step& step, const StepBuffers& buffers, int last_keeper)
    : spec_(spec),
      group_(group),
      biases_stride_(round_up(spec.max_position, kChunk)),
      positions_(positions),
      cache_(cache),
      windows_(windows),
      step_(step),
      buffers_(buffers),
      last_keeper_(last_keeper) {
  for (int i = 0; i < spec.num_layers; ++i) {
    const LayerSpec& layer = layers[i];
    const auto is_alike = [&](const Heads& heads) {
      return heads.total == layer.num_kv_heads && heads.group == layer.group() && heads.dim == layer.head_dim;
    };
    heads_of_layer_.push_back(-1);
    if (!layer.attends()) continue;
    auto known = std::find_if(heads_.begin(), heads_.end(), is_alike);
    if (known == heads_.end()) {
      const Span own = share.kv_heads(i);
      known = heads_.insert(known, Heads{own.count(),
                                         layer.group(),
                                         layer.head_dim,
                                         own.begin,
                                         layer.num_kv_heads,
                                         HadamardRotation(layer.head_dim),
                                         AttentionPlan(),
                                         {}});
    }
    heads_of_layer_.back() = (int)(known - heads_.begin());
  }
}

void AttentionStage::prepare(const Team& team) {
  by_head_ = team.spans_nodes();
  for (Heads& heads : heads_) {
    heads.plan.set(heads.count, heads.group, spec_.block_size, step_.plan, team.size(), spec_.is_encoder);
    if (last_keeper_ + 1 < spec_.num_layers) find_wanted(heads);
    if (heads.plan.splits_spans) {
      partials_.reserve((size_t)heads.plan.span_starts.back() * heads.count * kMaxQueryRows);
    }
  }
}

void AttentionStage::find_wanted(Heads& heads) const {
  std::vector<char> is_head(step_.plan.num_tokens, 0);
  for (const int token : step_.head_tokens) is_head[token] = 1;
  heads.is_wanted.clear();
  for (const QueryTile& tile : heads.plan.tiles) {
    const auto begin = is_head.begin() + token_of(heads, tile, 0);
    const auto end = is_head.begin() + token_of(heads, tile, tile.rows - 1) + 1;
    heads.is_wanted.push_back(std::find(begin, end, 1) != end);
  }
}

void AttentionStage::project(Worker& worker, const Layer& layer, LayerProducts& products, const Norm* pending) const {
  const auto normed = [&](int i) {
    float* row = buffers_.hidden.row(products.tokens()[i]);
    if (pending) pending->apply_in_place(row);
    return layer.attention_norm.apply(row).values;
  };
  const bool is_joint = layer.spec.joins_head_norms && !group_.is_alone();
  const RowBuffer& rows = is_joint ? buffers_.joint : buffers_.qkv;
  products.run(worker, layer, Slot::kQkv, normed, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      copy_panel(out + r * kPanel, rows.row(products.tokens()[first + r]) + panel * kPanel);
    }
  });
  if (is_joint) group_.meet(worker);
  if (layer.spec.joins_head_norms) norm_all_heads(worker, layer, rows);
}

// Norms the queries of each token, and its keys, over all heads together.
void AttentionStage::norm_all_heads(Worker& worker, const Layer& layer, const RowBuffer& unnormed) const {
  const int queries = layer.spec.queries(), keys = layer.spec.keys();
  worker.for_each(step_.plan.num_tokens, [&](int i) {
    const float* from = unnormed.row(i);
    float* row = buffers_.qkv.row(i);
    rms_norm(from, layer.q_norm.data(), queries, queries, spec_.norm_eps, row);
    rms_norm(from + queries, layer.k_norm.data(), keys, keys, spec_.norm_eps, row + queries);
    const int values = queries + keys;
    if (from != row) std::copy_n(from + values, keys, row + values);
  });
}

void AttentionStage::add_output(Worker& worker, const Layer& layer, LayerProducts& products) const {
  if (sets_inputs(layer, products)) {
    return products.add(worker, layer, Slot::kOut, products.kInputsAreSet, layer.attention_output_norm);
  }
  const auto attended = [&](int i) { return buffers_.attended.row(products.tokens()[i]); };
  products.add(worker, layer, Slot::kOut, attended, layer.attention_output_norm);
  if (!layer.spec.has_two_mixers()) return;
  const auto mixed = [&](int i) { return attended(i) + layer.spec.first_output(); };
  products.add(worker, layer, Slot::kMixerOut, mixed, layer.attention_output_norm);
}

// Computes how much of each head's output is kept of a token.
void AttentionStage::set_head_gates(const Layer& layer, int token) const {
  const RowBuffer& hidden = buffers_.hidden;
  const float* normed = layer.attention_norm.apply(hidden.row(token)).values;
  for (int head = 0; head < layer.spec.num_heads; ++head) {
    const float* row = layer.head_gates.data() + (size_t)head * hidden.stride();
    Floats sums = zeros();
    for (int c = 0; c < hidden.stride(); c += kLanes) sums = fma(load(normed + c), load(row + c), sums);
    buffers_.gates.row(token)[head] = (float)(1 / (1 + std::exp(-(double)sum(sums))));
  }
}

bool AttentionStage::sets_inputs(const Layer& layer, const LayerProducts& products) const {
  // The rows of a tile are then neighboring rows of the products, and heads fill groups of columns.
  return &products.tokens() == &step_.all_tokens && layer.spec.attends() && !layer.spec.recurs() &&
         layer.spec.group() == 1 && layer.spec.head_dim % kGroup == 0 && products.takes_columns(layer, Slot::kOut);
}

void AttentionStage::attend(Worker& worker, const Layer& layer, LayerProducts& products) const {
  const Heads& heads = heads_of(layer);
  const bool has_keys = layer.spec.has_keys();
  if (layer.spec.has_head_gates) {
    worker.for_each(step_.plan.num_tokens, [&](int i) { set_head_gates(layer, i); });
  }
  if (has_keys && !heads.plan.stores_with_tiles) store_all(worker, layer);
  if (heads.plan.splits_spans) return attend_by_span(worker, layer, products);
  const KvLayer& cache = cells_of(layer);
  const int end = heads.num_items();
  worker.for_each(end, [&](int i) {
    if (has_keys && heads.plan.stores_with_tiles) {
      const auto [token, head] = item(heads, i);
      store_key_value(layer, token, head);
      if (i + 1 < end) cache.fetch(slot_of(layer, item(heads, i + 1).tile), item(heads, i + 1).head);
    }
    attend_tile(layer, i, products);
  });
}

void AttentionStage::store_all(Worker& worker, const Layer& layer) const {
  const Heads& heads = heads_of(layer);
  const KvLayer& cache = cells_of(layer);
  const std::vector<int>& runs = heads.plan.store_runs;
  const int count = (int)runs.size() - 1, end = count * heads.count;
  worker.for_each(end, [&](int i) {
    const auto [run, head] = item_of(heads, i, count);
    const Item later = item_of(heads, std::min(i + kStoresAhead, end - 1), count);
    cache.fetch(slot_of(layer, runs[later.tile]), later.head);
    for (int token = runs[run]; token < runs[run + 1]; ++token) store_key_value(layer, token, head);
  });
}

void AttentionStage::store_key_value(const Layer& layer, int token, int head) const {
  const int dim = layer.spec.head_dim;
  alignas(64) float key[kMaxHeadDim];
  const float* keys = buffers_.qkv.row(token) + layer.spec.query_rows();
  const int own = heads_of(layer).first + head;
  prepare_head(layer, keys + own * dim, layer.k_norm, step_.plan.positions[token], key);
  const int slot = slot_of(layer, token);
  const KvLayer& cache = cells_of(layer);
  const float* value = keys + (layer.spec.num_kv_heads + own) * dim;
  alignas(64) float normed[kMaxHeadDim];
  if (layer.spec.has_value_norm) {
    unit_norm(value, dim, spec_.norm_eps, normed);
    value = normed;
  }
  cache.set(slot, head, key, value);
  if (begins_last_page(token)) cache.clear_behind(slot, head);
}

// Writes a head's query or key as the scores need it: normed if the model norms heads, rotated by RoPE, and rotated again
// for a cache in int8. Both are rotated, which leaves their product unchanged.
void AttentionStage::prepare_head(const Layer& layer, const float* x, const Buffer<float>& norm, int position,
                                  float* out) const {
  const int dim = layer.spec.head_dim, rotary = layer.spec.rotary_dim;
  alignas(64) float normed[kMaxHeadDim];
  if (norm.count() && !layer.spec.joins_head_norms) {
    rms_norm(x, norm.data(), dim, dim, spec_.norm_eps, normed);
    x = normed;
  }
  if (rotary > 0) {
    const RopeTable& table = positions_.ropes[layer.spec.rope];
    const size_t angles = (size_t)position * (rotary / 2);
    rotate(x, table.cos.data() + angles, table.sin.data() + angles, rotary, out);
  }
  if (rotary == 0) {
    for (int d = 0; d < dim; d += kLanes) store(out + d, load(x + d));
  } else {
    std::copy(x + rotary, x + dim, out + rotary);
  }
  if ((KvFormat)spec_.kv_format == KvFormat::kInt8) heads_of(layer).rotation.apply(out, out);
}

// The slot of a token's key and value in the cache of a layer.
int AttentionStage::slot_of(const Layer& layer, int token) const {
  const int position = step_.plan.positions[token];
  const int32_t* blocks = step_.block_table(step_.seq_of_token[token], layer.spec.is_windowed);
  const int block = blocks[position / spec_.block_size];
  return block * spec_.block_size + position % spec_.block_size;
}

// Whether a token is the last of its sequence in this step, and this step also stores the first token of its page.
bool AttentionStage::begins_last_page(int token) const {
  const Plan& plan = step_.plan;
  const int seq = step_.seq_of_token[token], position = plan.positions[token];
  return token + 1 == plan.query_starts[seq + 1] &&
         position - plan.positions[plan.query_starts[seq]] >= position % kPage;
}

void AttentionStage::attend_tile(const Layer& layer, int i, LayerProducts& products) const {
  const Heads& heads = heads_of(layer);
  const Item own = item(heads, i);
  if (!attends_for(layer, own.tile)) return;
  const QueryTile& tile = heads.plan.tiles[own.tile];
  RowInputs inputs;
  RowState states[kMaxQueryRows];
  QueryRows rows = query_rows(tile, layer, own.head, inputs);
  if (i + 1 < heads.num_items()) {
    const Item next = item(heads, i + 1);
    rows.next = context_of(heads.plan.tiles[next.tile], layer, next.head);
  }
  penstock::attend(cells_of(layer), rows, context_of(tile, layer, own.head).tokens, states);
  write_rows(layer, tile, own.head, states, products);
}

void AttentionStage::attend_by_span(Worker& worker, const Layer& layer, LayerProducts& products) const {
  const Heads& heads = heads_of(layer);
  const KvLayer& cache = cells_of(layer);
  const std::vector<QueryTile>& tiles = heads.plan.tiles;
  const std::vector<int>& starts = heads.plan.span_starts;
  const auto partial = [&](int span, int head) {
    return &partials_[((size_t)span * heads.count + head) * kMaxQueryRows];
  };
  worker.for_each(starts.back() * heads.count, [&](int i) {
    const auto [span, head] = item_of(heads, i, starts.back());
    const int t = (int)(std::upper_bound(starts.begin(), starts.end(), span) - starts.begin()) - 1;
    if (!attends_for(layer, t)) return;
    const int begin = (span - starts[t]) * kSpan;
    const int end = std::min(begin + kSpan, context_of(tiles[t], layer, head).tokens);
    RowInputs inputs;
    attend_span(cache, query_rows(tiles[t], layer, head, inputs), begin, end, partial(span, head));
  });
  worker.for_each(heads.num_items(), [&](int i) {
    const auto [t, head] = item(heads, i);
    if (!attends_for(layer, t)) return;
    RowState* states = partial(starts[t], head);
    for (int span = starts[t] + 1; span < starts[t + 1]; ++span) {
      for (int r = 0; r < tiles[t].rows; ++r) merge(states[r], partial(span, head)[r], heads.dim);
    }
    write_rows(layer, tiles[t], head, states, products);
  });
}

int AttentionStage::token_of(const Heads& heads, const QueryTile& tile, int row) const {
  return step_.plan.query_starts[tile.seq] + (tile.first_row + row) / heads.group;
}

Context AttentionStage::context_of(const QueryTile& tile, const Layer& layer, int head) const {
  const int first_token = token_of(heads_of(layer), tile, 0),
            last_token = token_of(heads_of(layer), tile, tile.rows - 1);
  const int first_chunk = first_seen(step_.plan.positions[first_token], layer) / kChunk * kChunk;
  const int end = spec_.is_encoder ? end_seen(step_.plan.positions[last_token], layer, tile.context) : tile.context;
  return {step_.block_table(tile.seq, layer.spec.is_windowed), head, first_chunk, end};
}

QueryRows AttentionStage::query_rows(const QueryTile& tile, const Layer& layer, int head, RowInputs& inputs) const {
  const Heads& heads = heads_of(layer);
  const int dim = heads.dim;
  const bool has_biases = layer.spec.has_position_biases;
  for (int r = 0; r < tile.rows; ++r) {
    const int token = token_of(heads, tile, r), position = step_.plan.positions[token];
    const int query = heads.query_of(head, tile.first_row + r);
    inputs.limits[r] = spec_.is_encoder ? end_seen(position, layer, tile.context) : position + 1;
    inputs.firsts[r] = first_seen(position, layer);
    inputs.biases[r] = has_biases ? &positions_.biases[(size_t)query * biases_stride_] : nullptr;
    const float* unprepared = buffers_.qkv.row(token) + query * layer.spec.query_stride();
    prepare_head(layer, unprepared, layer.q_norm, position, inputs.queries + r * dim);
    if (layer.spec.query_growth > 0) {
      scale_values(positions_.query_factors[layer.spec.query_growth - 1][position], dim, inputs.queries + r * dim);
    }
  }
  const Context context = context_of(tile, layer, head);
  return {.queries = inputs.queries,
          .limits = inputs.limits,
          .firsts = inputs.firsts,
          .biases = has_biases ? inputs.biases : nullptr,
          .count = tile.rows,
          .block_table = context.block_table,
          .head = head,
          .scale = layer.spec.score_scale != 0 ? layer.spec.score_scale : 1.f / std::sqrt((float)dim),
          .cap = layer.spec.score_cap,
          .first_chunk = context.first,
          .next = {}};
}

// Writes a head's rows, or inputs of the output product. The last head also clears the padding of rows, where a wider
// layer may have left numbers.
void AttentionStage::write_rows(const Layer& layer, const QueryTile& tile, int head, RowState* states,
                                LayerProducts& products) const {
  const Heads& heads = heads_of(layer);
  if (sets_inputs(layer, products)) {
    const int query = heads.query_of(head, 0), first = token_of(heads, tile, 0);
    alignas(64) float row[kMaxHeadDim], columns[kMaxHeadDim / kGroup][kMaxQueryRows * kGroup];
    for (int r = 0; r < tile.rows; ++r) {
      write_row(layer, first + r, query, states[r], row);
      for (int d = 0; d < heads.dim; d += kPanel) copy_panel(row + d, columns[d / kGroup] + r * kGroup);
    }
    for (int g = 0; g < heads.dim / kGroup; ++g) {
      products.set_input(layer, Slot::kOut, first, tile.rows, query * heads.dim / kGroup + g, columns[g]);
    }
    return;
  }
  const int width = heads.total * heads.group * heads.dim;
  const bool is_last = heads.first + head + 1 == heads.total;
  for (int r = 0; r < tile.rows; ++r) {
    const int token = token_of(heads, tile, r), query = heads.query_of(head, tile.first_row + r);
    float* row = buffers_.attended.row(token);
    write_row(layer, token, query, states[r], row + query * heads.dim);
    if (is_last) std::fill(row + width, row + round_up(width, kPanel), 0.f);
  }
}

void AttentionStage::write_row(const Layer& layer, int token, int query, RowState& state, float* out) const {
  const int dim = layer.spec.head_dim;
  if (layer.sinks.count()) add_sink(state, layer.sinks[query], dim);
  finish(state, dim, out);
  if (layer.spec.has_output_gate) {
    gate_values(buffers_.qkv.row(token) + query * layer.spec.query_stride() + dim, dim, out);
  }
  float factor = layer.spec.attention_factor;
  if (layer.spec.has_head_gates) factor *= buffers_.gates.row(token)[query];
  if (factor != 1) scale_values(factor, dim, out);
}

}  // namespace penstock
