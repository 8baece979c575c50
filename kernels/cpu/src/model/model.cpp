#include "model/model.h"

#include <algorithm>
#include <chrono>

namespace penstock {

namespace {

// What the layers with windows keep, or what the others do. The rest keeps nothing there.
std::vector<KvShape> kv_shapes_of(const Spec& spec, const LayerSpec* layers, const Share& share, bool windowed) {
  std::vector<KvShape> shapes;
  for (int i = 0; i < spec.num_layers; ++i) {
    const bool keeps = layers[i].has_keys() && (layers[i].is_windowed != 0) == windowed;
    shapes.push_back(
        {(KvFormat)spec.kv_format, keeps ? share.kv_heads(i).count() : 0, layers[i].head_dim, spec.block_size});
  }
  return shapes;
}

// The last layer that keeps something of each token: keys and values, or a state.
int last_keeper_of(const Spec& spec, const LayerSpec* layers) {
  int last = 0;
  for (int i = 0; i < spec.num_layers; ++i) {
    if (layers[i].has_keys() || layers[i].recurs()) last = i;
  }
  return last;
}

}  // namespace

Model::Model(const Spec& spec, const LayerSpec* layers, int num_threads, const int32_t* cores)
    : spec_(spec),
      share_(spec, layers),
      last_keeper_(last_keeper_of(spec, layers)),
      group_(spec.rank, spec.group_size()),
      team_(num_threads, cores),
      weights_(spec, layers),
      cache_(kv_shapes_of(spec, layers, share_, false), spec.num_blocks, spec.is_encoder),
      windows_(kv_shapes_of(spec, layers, share_, true), spec.num_window_blocks),
      adapters_(spec.num_layers),
      buffers_(spec, layers),
      products_(step_.all_tokens, spec_, share_, group_, step_, adapters_, buffers_, num_threads),
      last_products_(step_.head_tokens, spec_, share_, group_, step_, adapters_, buffers_, num_threads),
      tokens_(spec_, weights_, step_, buffers_),
      attention_(spec_, layers, share_, group_, weights_.positions, cache_, windows_, step_, buffers_, last_keeper_),
      recurrent_(spec_, layers, step_, adapters_, buffers_),
      mlp_(group_, weights_, buffers_),
      experts_(spec_, layers, share_, group_, buffers_),
      head_(spec_, share_, group_, weights_.final_norm, weights_.head, step_, buffers_),
      scores_(spec_, share_, group_, weights_.final_norm, weights_.head, step_, buffers_),
      states_(spec.hidden, weights_, step_, buffers_) {}

void Model::set_adapter(int adapter_slot, int layer, Slot matrix, const LowRankPart* parts, int num_parts,
                        const float* gains) {
  const auto [rows, columns] = weights_.shape_of(matrix, layer);
  LowRank low_rank(parts, num_parts, rows, columns, weights_.transform_of(matrix, layer, gains));
  adapters_.set(adapter_slot, layer, matrix, std::move(low_rank));
}

std::vector<int32_t> Model::rank_panels(int layer, Slot slot) const {
  const bool is_table = slot == Slot::kEmbedding || slot == Slot::kHead;
  const PanelSet& own = is_table ? share_.head_panels() : share_.panels(layer, slot);
  const LayerSpec& spec = weights_.layers[layer].spec;
  const Layer& own_layer = weights_.layers[layer];
  const bool is_of_expert = spec.num_experts > 0 && (slot == own_layer.expert_in() || slot == own_layer.expert_out());
  const int outputs =
      slot == own_layer.expert_in() ? spec.inner_panels(spec.expert_size()) : (spec_.hidden + kPanel - 1) / kPanel;
  std::vector<int32_t> panels;
  for (int expert = 0; expert < (is_of_expert ? spec.all_experts() : 1); ++expert) {
    for (int i = 0; i < own.count(); ++i) panels.push_back(expert * outputs + own.at(i));
  }
  return panels;
}

size_t Model::shared_bytes(const Plan& plan) {
  this->plan(plan);
  Arena counted;
  place(counted);
  return counted.used();
}

void Model::start(const Plan& plan) {
  group_.begin();
  try {
    this->plan(plan);
    prepare();
  } catch (const std::bad_alloc&) {
    group_.refuse();
    throw;
  }
  team_.start([this](Worker& worker) { run(worker); });
}

int Model::wait() {
  const int active = team_.active();
  team_.join();
  return active;
}

void Model::plan(const Plan& plan) {
  step_.begin(plan);
  head_.plan_rows();
}

void Model::place(Arena& arena) {
  buffers_.place(arena, step_.plan.num_tokens);
  experts_.place(arena, step_.plan.num_tokens);
  scores_.place(arena);
  head_.place(arena);
}

void Model::prepare() {
  if (group_.is_alone()) {
    buffers_.reserve(step_.plan.num_tokens);
  } else {
    Arena arena = group_.arena();
    place(arena);
  }
  for (const Layer& layer : weights_.layers) {
    LayerProducts& later = products_after_attention(layer);
    if (layer.spec.mixes()) {
      products_before_attention(layer).prepare(layer, Slot::kQkv);
      later.prepare(layer, Slot::kOut);
      if (layer.spec.has_two_mixers()) later.prepare(layer, Slot::kMixerOut);
    }
    if (layer.spec.num_experts > 0) experts_.prepare(layer, (int)later.tokens().size());
    if (layer.spec.has_mlp() && (layer.spec.num_experts == 0 || layer.spec.has_mixture())) {
      later.prepare(layer, Slot::kMlpIn);
      later.prepare(layer, Slot::kMlpOut);
    }
    if (spec_.token_size > 0) {
      later.prepare(layer, Slot::kTokenGate);
      later.prepare(layer, Slot::kTokenOut);
    }
  }
  tokens_.prepare();
  attention_.prepare(team_);
  recurrent_.prepare();
  head_.prepare(team_.size());
  scores_.prepare();
}

void Model::run(Worker& worker) {
  group_.vote(worker);
  if (!group_.is_over()) compute(worker);
}

void Model::compute(Worker& worker) {
  const Plan& plan = step_.plan;
  const auto started = std::chrono::steady_clock::now();
  copy_blocks(worker, cache_, plan.copies, plan.num_copies);
  copy_blocks(worker, windows_, plan.window_copies, plan.num_window_copies);
  const auto began = std::chrono::steady_clock::now();
  embed(worker);
  tokens_.project(worker);
  const Norm* pending = nullptr;
  for (const Layer& layer : weights_.layers) {
    pending = run_layer(worker, layer, pending);
    if (group_.is_over()) return;
  }
  head_.project(worker);
  if (group_.is_over()) return;
  const auto projected = std::chrono::steady_clock::now();
  if (group_.leads()) head_.choose(worker);
  scores_.run(worker);
  if (group_.is_over() || !group_.leads()) return;
  states_.run(worker);
  if (worker.leads()) {
    const auto milliseconds = [](auto span) { return std::chrono::duration<float, std::milli>(span).count(); };
    plan.times_ms[0] = milliseconds(projected - began);
    plan.times_ms[1] = milliseconds(std::chrono::steady_clock::now() - projected);
    plan.times_ms[2] = milliseconds(began - started);
  }
}

void Model::copy_blocks(Worker& worker, const KvCache& cache, const int32_t* copies, int count) const {
  if (count == 0) return;
  worker.for_each(cache.num_slices(), [&](int i) { cache.copy_slice(copies, count, i); });
}

void Model::embed(Worker& worker) {
  const Matrix& table = weights_.embedding_rows();
  const RowBuffer& hidden = buffers_.hidden;
  worker.for_each(step_.plan.num_tokens, [&](int i) {
    if (!share_.embeds(step_.plan.token_ids[i])) return;
    float* row = hidden.row(i);
    table.get_row(step_.plan.token_ids[i], row);
    if (group_.is_alone()) {
      clear_padding(hidden, i, spec_.hidden);
    } else {
      buffers_.clear_paddings(i);
    }
    for (int c = 0; spec_.embedding_scale != 1 && c < hidden.stride(); c += kLanes) {
      store(row + c, load(row + c) * broadcast(spec_.embedding_scale));
    }
    if (step_.plan.token_types) {
      add_scaled(&weights_.type_embeddings[(size_t)step_.plan.token_types[i] * hidden.stride()], 1, hidden.stride(),
                 row);
    }
    if (weights_.positions.embeddings.count() > 0) {
      const float* position = &weights_.positions.embeddings[(size_t)step_.plan.positions[i] * hidden.stride()];
      for (int c = 0; c < hidden.stride(); c += kLanes) store(row + c, load(row + c) + load(position + c));
    }
    if (weights_.embedding_norm.is_present()) weights_.embedding_norm.apply_in_place(row);
  });
  group_.meet(worker);
}

// `pending`: the norm of the sums behind the layer before, if it is still to be applied, or null. Returns the same of
// this layer.
const Norm* Model::run_layer(Worker& worker, const Layer& layer, const Norm* pending) {
  const bool mixes = layer.spec.mixes();
  if (mixes) {
    LayerProducts& before = products_before_attention(layer);
    if (before.tokens().empty()) return nullptr;
    attention_.project(worker, layer, before, pending);
    pending = nullptr;
    if (layer.spec.attends()) attention_.attend(worker, layer, products_after_attention(layer));
    if (layer.spec.recurs()) recurrent_.mix(worker, layer);
    group_.meet(worker);
  }
  LayerProducts& products = products_after_attention(layer);
  if (products.tokens().empty()) return nullptr;
  if (layer.spec.is_parallel) {
    // The MLP comes first, because it reads the same hidden state as the attention.
    run_mlp(worker, layer, products, nullptr);
    // The other ranks have read the outputs whose rows the next ones take.
    if (layer.spec.has_output_norms()) group_.meet(worker);
    attention_.add_output(worker, layer, products);
  } else {
    if (mixes) attention_.add_output(worker, layer, products);
    const bool has_plain_mlp = layer.spec.has_mlp() && layer.spec.num_experts == 0;
    pending = norm_sums(worker, layer.attention_sum_norm, products, has_plain_mlp);
    if (mixes && layer.spec.has_mlp()) group_.meet(worker);
    if (layer.spec.has_mlp()) run_mlp(worker, layer, products, pending);
    const bool is_last = layer.index + 1 == spec_.num_layers;
    const bool mixes_next = !is_last && weights_.layers[layer.index + 1].spec.mixes() && spec_.token_size == 0;
    pending = norm_sums(worker, layer.mlp_sum_norm, products, mixes_next);
  }
  if (spec_.token_size > 0) tokens_.add(worker, layer, products);
  group_.meet(worker);
  return pending;
}

// Norms the hidden states of the products' tokens in place. If the next product reads each of them once, it is left to
// norm them when it does, and the norm is returned.
const Norm* Model::norm_sums(Worker& worker, const Norm& norm, const LayerProducts& products,
                             bool has_next_product) const {
  if (!norm.is_present()) return nullptr;
  if (has_next_product && products.reads_once()) return &norm;
  worker.for_each((int)products.tokens().size(),
                  [&](int i) { norm.apply_in_place(buffers_.hidden.row(products.tokens()[i])); });
  return nullptr;
}

void Model::run_mlp(Worker& worker, const Layer& layer, LayerProducts& products, const Norm* pending) {
  if (layer.spec.num_experts > 0) experts_.run(worker, layer, products.tokens());
  if (layer.spec.has_mixture()) return mlp_.run(worker, layer, products, &experts_.kept(), nullptr);
  if (layer.spec.num_experts == 0) mlp_.run(worker, layer, products, nullptr, pending);
}

}  // namespace penstock
