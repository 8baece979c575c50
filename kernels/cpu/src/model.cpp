#include "model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "gemm.h"

namespace penstock {
namespace {

// Answers false where the row is not finite.
bool rms_norm(const float* x, const float* weight, int padded, int count, float eps, float* out) {
  Floats squares = zeros();
  for (int i = 0; i < padded; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const float total = sum(squares);
  const Floats inverse = broadcast(1.f / std::sqrt(total / count + eps));
  for (int i = 0; i < padded; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
  return std::isfinite(total);
}

// So few rows are written by every thread for itself: that costs less than waiting for each other.
constexpr int kRowsToRepeat = 2;

void prepare(std::vector<Inputs>& inputs, Input input, int rows, int columns, Format format) {
  for (Inputs& own : inputs) {
    own[input][(int)format].prepare(rows, columns, format);
    if (rows > kRowsToRepeat) return;
  }
}

// Has `write(activations, row)` called for each row; the activations to multiply with.
template <class Write>
Activations& fill_rows(Member& member, std::vector<Inputs>& inputs, Input input, Format format, int rows, const Write& write) {
  if (rows <= kRowsToRepeat) {
    Activations& own = inputs[member.index()][input][(int)format];
    for (int i = 0; i < rows; ++i) write(own, i);
    return own;
  }
  Activations& shared = inputs[0][input][(int)format];
  member.for_each(rows, [&](int i) { write(shared, i); });
  return shared;
}

}  // namespace

Model::Model(const Spec& spec, int num_threads, const int32_t* cores)
    : final_norm(round_up(spec.hidden, kPanel)),
      cos((size_t)spec.max_position * spec.head_dim / 2),
      sin((size_t)spec.max_position * spec.head_dim / 2),
      spec_(spec),
      team_(num_threads, cores),
      cache_({(KvFormat)spec.kv_format, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size,
              spec.num_blocks}),
      hidden_turn_(spec.turned ? spec.hidden : 1),
      gated_turn_(spec.turned ? spec.intermediate : 1),
      hidden_stride_(round_up(spec.hidden, kPanel)),
      qkv_stride_(round_up(spec.queries() + 2 * spec.num_kv_heads * spec.head_dim, kPanel)),
      attended_stride_(round_up(spec.queries(), kPanel)),
      gated_stride_(round_up(spec.intermediate, kPanel)),
      logits_stride_(round_up(spec.vocab, kPanel)),
      inputs_(num_threads),
      last_inputs_(num_threads) {
  for (int i = 0; i < spec.num_layers; ++i) {
    layers_.push_back({Buffer<float>(hidden_stride_), Buffer<float>(hidden_stride_), {}, {}, {}, {}});
  }
}

Matrix& Model::matrix(Slot slot, int layer) {
  switch (slot) {
    case Slot::kQkv:
      return layers_[layer].qkv;
    case Slot::kO:
      return layers_[layer].o;
    case Slot::kGateUp:
      return layers_[layer].gate_up;
    case Slot::kDown:
      return layers_[layer].down;
    case Slot::kEmbedding:
      return embedding;
    default:
      return head;
  }
}

void Model::fill(Slot slot, int layer, const Part& part, const float* gains) {
  penstock::fill(team_, matrix(slot, layer), part, change_of(slot, gains));
}

Change Model::change_of(Slot slot, const float* gains) const {
  if (!spec_.turned) return {nullptr, nullptr, nullptr};
  switch (slot) {
    case Slot::kO:
      return {nullptr, nullptr, &hidden_turn_};
    case Slot::kDown:
      return {nullptr, &gated_turn_, &hidden_turn_};
    default:
      return {gains, &hidden_turn_, nullptr};
  }
}

void Model::start(const Plan& plan) {
  plan_ = plan;
  seq_of_token_.resize(plan.num_tokens);
  all_tokens_.resize(plan.num_tokens);
  std::iota(all_tokens_.begin(), all_tokens_.end(), 0);
  decodes_only_ = plan.num_tokens == plan.num_seqs;
  for (int s = 0; s < plan.num_seqs; ++s) {
    std::fill(seq_of_token_.begin() + plan.query_starts[s], seq_of_token_.begin() + plan.query_starts[s + 1], s);
  }
  plan_head();
  plan_attention();
  reserve();
  team_.start([this](Member& member) { run(member); });
}

void Model::reserve() {
  const int rows = plan_.num_tokens;
  hidden_.reserve((size_t)rows * hidden_stride_);
  qkv_.reserve((size_t)rows * qkv_stride_);
  attended_.reserve((size_t)rows * attended_stride_);
  gated_.reserve((size_t)rows * gated_stride_);
  const int head_rows = (int)head_tokens_.size();
  for (const Layer& layer : layers_) {
    const bool is_last = &layer == &layers_.back();
    auto& tail = is_last ? last_inputs_ : inputs_;
    const int tail_rows = is_last ? head_rows : rows;
    prepare(inputs_, kNormed, rows, spec_.hidden, layer.qkv.format);
    prepare(tail, kAttended, tail_rows, spec_.queries(), layer.o.format);
    prepare(tail, kNormed, tail_rows, spec_.hidden, layer.gate_up.format);
    prepare(tail, kGated, tail_rows, spec_.intermediate, layer.down.format);
  }
  head_in_.prepare(head_rows, spec_.hidden, head.format);
  bests_.assign(head_tokens_.size() * team_.size(), {-std::numeric_limits<float>::infinity(), 0, true});
  poisoned_.assign(head_tokens_.size(), 0);
}

void Model::run(Member& member) {
  const auto started = std::chrono::steady_clock::now();
  if (plan_.num_copies > 0) {
    member.for_each(cache_.num_slices(), [&](int i) { cache_.copy_slice(plan_.copies, plan_.num_copies, i); });
  }
  const auto began = std::chrono::steady_clock::now();
  embed(member);
  for (int i = 0; i < spec_.num_layers; ++i) run_layer(member, i);
  if (!head_tokens_.empty()) project_head(member);
  const auto projected = std::chrono::steady_clock::now();
  if (!head_tokens_.empty()) choose(member);
  if (member.leads()) {
    const auto milliseconds = [](auto span) { return std::chrono::duration<float, std::milli>(span).count(); };
    plan_.times_ms[0] = milliseconds(projected - began);
    plan_.times_ms[1] = milliseconds(std::chrono::steady_clock::now() - projected);
    plan_.times_ms[2] = milliseconds(began - started);
  }
}

void Model::embed(Member& member) {
  const Matrix& table = embedding.rows ? embedding : head;
  member.for_each(plan_.num_tokens, [&](int i) {
    float* row = hidden_row(i);
    table.get_row(plan_.token_ids[i], row);
    std::fill(row + spec_.hidden, row + hidden_stride_, 0.f);
  });
}

bool Model::norm_into(Activations& left, int row, int token, const Buffer<float>& weight) {
  thread_local std::vector<float> normed;
  normed.resize(hidden_stride_);
  const bool finite =
      rms_norm(hidden_row(token), weight.data(), hidden_stride_, spec_.hidden, spec_.norm_eps, normed.data());
  left.set_row(row, normed.data());
  return finite;
}

void Model::run_layer(Member& member, int index) {
  Layer& layer = layers_[index];
  const Activations& normed =
      fill_rows(member, inputs_, kNormed, layer.qkv.format, plan_.num_tokens,
           [&](Activations& left, int i) { norm_into(left, i, i, layer.attention_norm); });
  multiply(member, normed, layer.qkv, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) std::copy_n(out + r * kPanel, kPanel, qkv_row(first + r) + panel * kPanel);
  });
  attend_all(member, index);
  // Behind the last attention a token matters only where its logits are wanted.
  if (index + 1 < spec_.num_layers) {
    run_tail(member, layer, all_tokens_, inputs_);
  } else if (!head_tokens_.empty()) {
    run_tail(member, layer, head_tokens_, last_inputs_);
  }
}

// What follows the attention, for the tokens `rows`.
void Model::run_tail(Member& member, Layer& layer, const std::vector<int>& rows,
                     std::vector<Inputs>& inputs) {
  const int num_rows = (int)rows.size();
  const auto add_to_hidden = [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      float* h = hidden_row(rows[first + r]) + panel * kPanel;
      for (int j = 0; j < kPanel; j += kLanes) store(h + j, load(h + j) + load(out + r * kPanel + j));
    }
  };

  const Activations& attended =
      fill_rows(member, inputs, kAttended, layer.o.format, num_rows,
           [&](Activations& left, int i) { left.set_row(i, attended_row(rows[i])); });
  multiply(member, attended, layer.o, add_to_hidden);

  const Activations& normed =
      fill_rows(member, inputs, kNormed, layer.gate_up.format, num_rows,
           [&](Activations& left, int i) { norm_into(left, i, rows[i], layer.mlp_norm); });
  multiply(member, normed, layer.gate_up, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      float* gated = gated_row(first + r) + panel * kLanes;
      store(gated, silu(load(out + r * kPanel)) * load(out + r * kPanel + kLanes));
    }
  });

  const Activations& gated = fill_rows(member, inputs, kGated, layer.down.format, num_rows, [&](Activations& left, int i) {
    thread_local std::vector<float> turned;
    const float* row = gated_row(i);
    if (spec_.turned) {
      turned.resize(gated_stride_);
      gated_turn_.apply(row, turned.data());
      row = turned.data();
    }
    left.set_row(i, row);
  });
  multiply(member, gated, layer.down, add_to_hidden);
}

}  // namespace penstock
