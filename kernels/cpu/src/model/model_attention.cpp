// The attention of a step: which tokens attend to which, and how threads share the work.
#include <algorithm>
#include <cmath>

#include "model/model.h"

namespace penstock {
namespace {

// With fewer attention tiles per thread than this, long contexts are cut into spans that threads share.
constexpr int kTilesPerThread = 4;

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

}  // namespace

void Model::plan_attention() {
  tiles_.clear();
  span_starts_.clear();
  store_runs_.clear();
  int spans = 0, longest = 0;
  for (int s = 0; s < plan_.num_seqs; ++s) {
    for (int token = plan_.query_starts[s]; token < plan_.query_starts[s + 1]; ++token) {
      const bool continues = token > plan_.query_starts[s] && plan_.positions[token] % kTokensPerWord != 0;
      if (!continues) store_runs_.push_back(token);
    }
    const int rows = (plan_.query_starts[s + 1] - plan_.query_starts[s]) * spec_.group();
    const int count = (rows + kMaxQueryRows - 1) / kMaxQueryRows;
    for (int t = 0; t < count; ++t) {
      const int first = (int64_t)rows * t / count, end = (int64_t)rows * (t + 1) / count;
      const int last_token = plan_.query_starts[s] + (end - 1) / spec_.group();
      const int context = plan_.positions[last_token] + 1;
      tiles_.push_back({s, first, end - first, context});
      span_starts_.push_back(spans);
      spans += num_spans(context);
      longest = std::max(longest, context);
    }
  }
  fills_block_ = std::any_of(plan_.positions, plan_.positions + plan_.num_tokens,
                             [&](int position) { return (position + 1) % spec_.block_size == 0; });
  store_runs_.push_back(plan_.num_tokens);
  span_starts_.push_back(spans);
  const int units = (int)tiles_.size() * spec_.num_kv_heads;
  splits_spans_ = longest > kSpan && units < kTilesPerThread * team_.size();
  if (splits_spans_) partials_.reserve((size_t)spans * spec_.num_kv_heads * kMaxQueryRows);
}

int Model::slot_of(int token) const {
  const int position = plan_.positions[token];
  const int32_t* table = plan_.block_tables + (size_t)seq_of_token_[token] * plan_.block_table_stride;
  return table[position / spec_.block_size] * spec_.block_size + position % spec_.block_size;
}

// Writes a head's query or key as the scores need it: normed if the model norms heads, and rotated by RoPE.
void Model::place_head(const float* x, const Buffer<float>& norm, int position, float* out) const {
  const int dim = spec_.head_dim, rotary = spec_.rotary_dim;
  alignas(64) float normed[kMaxHeadDim];
  if (norm.count()) {
    rms_norm(x, norm.data(), dim, dim, spec_.norm_eps, normed);
    x = normed;
  }
  const size_t angles = (size_t)position * (rotary / 2);
  rotate(x, cos.data() + angles, sin.data() + angles, rotary, out);
  std::copy(x + rotary, x + dim, out + rotary);
}

void Model::store_key_value(int layer, int token, int head) {
  const int dim = spec_.head_dim;
  alignas(64) float key[kMaxHeadDim];
  const float* keys = qkv_row(token) + spec_.queries();
  place_head(keys + head * dim, layers_[layer].k_norm, plan_.positions[token], key);
  const int slot = slot_of(token);
  cache_.set(layer, slot, head, key, keys + (spec_.num_kv_heads + head) * dim);
  if (begins_last_page(token)) cache_.clear_behind(layer, slot, head);
}

// Whether a token is the last of its sequence in this step, and this step also stores the first token of its page.
bool Model::begins_last_page(int token) const {
  const int seq = seq_of_token_[token], position = plan_.positions[token];
  return token + 1 == plan_.query_starts[seq + 1] &&
         position - plan_.positions[plan_.query_starts[seq]] >= position % kPage;
}

int Model::first_seen(int position, int layer) const {
  const int window = layers_[layer].window;
  return window == 0 ? 0 : std::max(0, position + 1 - window);
}

Context Model::context_of(const QueryTile& tile, int layer, int head) const {
  const int token = plan_.query_starts[tile.seq] + tile.first_row / spec_.group();
  const int first_chunk = first_seen(plan_.positions[token], layer) / kChunk * kChunk;
  return {plan_.block_tables + (size_t)tile.seq * plan_.block_table_stride, head, first_chunk, tile.context};
}

QueryRows Model::query_rows(const QueryTile& tile, int layer, int head, RowInputs& inputs) const {
  const int dim = spec_.head_dim, group = spec_.group();
  for (int r = 0; r < tile.rows; ++r) {
    const int token = plan_.query_starts[tile.seq] + (tile.first_row + r) / group;
    const int query = head * group + (tile.first_row + r) % group, position = plan_.positions[token];
    inputs.limits[r] = position + 1;
    inputs.firsts[r] = first_seen(position, layer);
    inputs.biases[r] = position_biases.count() ? &position_biases[(size_t)query * biases_stride_] : nullptr;
    place_head(qkv_row(token) + query * dim, layers_[layer].q_norm, position, inputs.queries + r * dim);
  }
  const Context context = context_of(tile, layer, head);
  const float* const* biases = position_biases.count() ? inputs.biases : nullptr;
  return {inputs.queries, inputs.limits, inputs.firsts, biases, tile.rows, context.block_table, layer, head,
          1.f / std::sqrt((float)dim), context.first, {}};
}

void Model::write_rows(const QueryTile& tile, int head, const RowState* states) {
  const int group = spec_.group();
  for (int r = 0; r < tile.rows; ++r) {
    const int token = plan_.query_starts[tile.seq] + (tile.first_row + r) / group;
    const int query = head * group + (tile.first_row + r) % group;
    finish(states[r], spec_.head_dim, attended_row(token) + query * spec_.head_dim);
  }
}

void Model::attend_tile(int layer, int item) {
  const int heads = spec_.num_kv_heads, next = item + 1, head = item % heads;
  const QueryTile& tile = tiles_[item / heads];
  RowInputs inputs;
  RowState states[kMaxQueryRows];
  QueryRows rows = query_rows(tile, layer, head, inputs);
  if (next < (int)tiles_.size() * heads) rows.next = context_of(tiles_[next / heads], layer, next % heads);
  attend(cache_, rows, tile.context, states);
  write_rows(tile, head, states);
}

void Model::attend_all(Worker& worker, int layer) {
  const int heads = spec_.num_kv_heads, num_tiles = (int)tiles_.size();
  // Another sequence of this step may read only blocks that this step fills. If it fills none, each token's key and
  // value are stored right before its own tile attends.
  const bool stores_on_the_way = decodes_only_ && !fills_block_ && num_tiles == plan_.num_seqs && !splits_spans_;
  if (!stores_on_the_way) {
    const int num_items = ((int)store_runs_.size() - 1) * heads;
    worker.for_each(num_items, [&](int i) {
      const int run = i / heads, later = std::min(i + kStoresAhead, num_items - 1);
      cache_.fetch(layer, slot_of(store_runs_[later / heads]), later % heads);
      for (int token = store_runs_[run]; token < store_runs_[run + 1]; ++token) store_key_value(layer, token, i % heads);
    });
  }
  if (splits_spans_) return attend_by_span(worker, layer);
  worker.for_each(num_tiles * heads, [&](int i) {
    if (stores_on_the_way) {
      store_key_value(layer, i / heads, i % heads);
      if (i + 1 < num_tiles * heads) cache_.fetch(layer, slot_of((i + 1) / heads), (i + 1) % heads);
    }
    attend_tile(layer, i);
  });
}

void Model::attend_by_span(Worker& worker, int layer) {
  const int heads = spec_.num_kv_heads;
  const auto partial = [&](int span, int head) { return &partials_[((size_t)span * heads + head) * kMaxQueryRows]; };
  worker.for_each(span_starts_.back() * heads, [&](int i) {
    const int span = i / heads, head = i % heads;
    const int t = (int)(std::upper_bound(span_starts_.begin(), span_starts_.end(), span) - span_starts_.begin()) - 1;
    const int begin = (span - span_starts_[t]) * kSpan;
    RowInputs inputs;
    attend_span(cache_, query_rows(tiles_[t], layer, head, inputs), begin,
                std::min(begin + kSpan, tiles_[t].context), partial(span, head));
  });
  worker.for_each((int)tiles_.size() * heads, [&](int i) {
    const int t = i / heads, head = i % heads;
    RowState* states = partial(span_starts_[t], head);
    for (int span = span_starts_[t] + 1; span < span_starts_[t + 1]; ++span) {
      for (int r = 0; r < tiles_[t].rows; ++r) merge(states[r], partial(span, head)[r], spec_.head_dim);
    }
    write_rows(tiles_[t], head, states);
  });
}

}  // namespace penstock
