#include "model/model.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>

#include "gemm/gemm.h"

namespace penstock {
namespace {

// Up to this many rows, every thread writes all input rows for itself, which costs less than a barrier.
constexpr int kRowsToRepeat = 2;

void prepare(std::vector<Inputs>& inputs, Input input, int rows, int columns, Format format) {
  for (Inputs& own : inputs) {
    own[input][(int)format].prepare(rows, columns, format);
    if (rows > kRowsToRepeat) return;
  }
}

// Calls `write(activations, row)` for each row and returns the activations to multiply. If `repeats`, every thread
// writes all rows, into activations of its own.
template <class Write>
Activations& fill_rows(Worker& worker, std::vector<Inputs>& inputs, Input input, Format format, int rows, bool repeats,
                       const Write& write) {
  if (repeats) {
    Activations& own = inputs[worker.index()][input][(int)format];
    for (int i = 0; i < rows; ++i) write(own, i);
    return own;
  }
  Activations& shared = inputs[0][input][(int)format];
  worker.for_each(rows, [&](int i) { write(shared, i); });
  return shared;
}

}  // namespace

Model::Model(const Spec& spec, int num_threads, const int32_t* cores)
    : cos((size_t)spec.max_position * spec.rotary_dim / 2),
      sin((size_t)spec.max_position * spec.rotary_dim / 2),
      spec_(spec),
      team_(num_threads, cores),
      cache_({(KvFormat)spec.kv_format, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size,
              spec.num_blocks}),
      hidden_rotation_(spec.turned ? spec.hidden : 1),
      gated_rotation_(spec.turned ? spec.intermediate : 1),
      hidden_stride_(round_up(spec.hidden, kPanel)),
      qkv_stride_(round_up(spec.queries() + 2 * spec.num_kv_heads * spec.head_dim, kPanel)),
      attended_stride_(round_up(spec.queries(), kPanel)),
      gated_stride_(round_up(spec.intermediate, kPanel)),
      logits_stride_(round_up(spec.vocab, kPanel)),
      biases_stride_(round_up(spec.max_position, kChunk)),
      inputs_(num_threads),
      last_inputs_(num_threads) {
  const auto new_norm = [&] {
    return Norm{Buffer<float>(hidden_stride_), Buffer<float>(spec.has_layer_norms ? hidden_stride_ : 0)};
  };
  final_norm = new_norm();
  layers_.resize(spec.num_layers);
  for (Layer& layer : layers_) {
    layer.attention_norm = new_norm();
    layer.mlp_norm = new_norm();
  }
}

Matrix& Model::matrix(Slot slot, int layer) {
  switch (slot) {
    case Slot::kQkv:
      return layers_[layer].qkv;
    case Slot::kOut:
      return layers_[layer].out;
    case Slot::kMlpIn:
      return layers_[layer].mlp_in;
    case Slot::kMlpOut:
      return layers_[layer].mlp_out;
    case Slot::kEmbedding:
      return embedding;
    default:
      return head;
  }
}

void Model::fill(Slot slot, int layer, const Part& part, const float* gains) {
  penstock::fill(team_, matrix(slot, layer), part, transform_of(slot, gains));
}

void Model::set_bias(Slot slot, int layer, Place place, int first, const float* values, int count) {
  Matrix& target = matrix(slot, layer);
  target.bias.reserve((size_t)target.num_panels() * kPanel);
  for (int i = 0; i < count; ++i) target.bias[place_row(place, first, i)] = values[i];
  const HadamardRotation* rotation = transform_of(slot, nullptr).outputs;
  if (rotation) rotation->apply(target.bias.data(), target.bias.data());
}

WeightTransform Model::transform_of(Slot slot, const float* gains) const {
  if (!spec_.turned) return {nullptr, nullptr, nullptr};
  switch (slot) {
    case Slot::kOut:
      return {nullptr, nullptr, &hidden_rotation_};
    case Slot::kMlpOut:
      return {nullptr, &gated_rotation_, &hidden_rotation_};
    default:
      return {gains, &hidden_rotation_, nullptr};
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
  team_.start([this](Worker& worker) { run(worker); });
}

void Model::reserve() {
  const int rows = plan_.num_tokens;
  hidden_.reserve((size_t)rows * hidden_stride_);
  qkv_.reserve((size_t)rows * qkv_stride_);
  attended_.reserve((size_t)rows * attended_stride_);
  gated_.reserve((size_t)rows * gated_stride_);
  if (plan_.adapters) inner_.reserve((size_t)rows * inner_stride_);
  const int head_rows = (int)head_tokens_.size();
  for (const Layer& layer : layers_) {
    const bool is_last = &layer == &layers_.back();
    auto& tail = is_last ? last_inputs_ : inputs_;
    const int tail_rows = is_last ? head_rows : rows;
    prepare(inputs_, kNormed, rows, spec_.hidden, layer.qkv.format);
    prepare(tail, kAttended, tail_rows, spec_.queries(), layer.out.format);
    prepare(tail, kNormed, tail_rows, spec_.hidden, layer.mlp_in.format);
    prepare(tail, kGated, tail_rows, spec_.intermediate, layer.mlp_out.format);
  }
  reserve_head();
}

void Model::run(Worker& worker) {
  const auto started = std::chrono::steady_clock::now();
  if (plan_.num_copies > 0) {
    worker.for_each(cache_.num_slices(), [&](int i) { cache_.copy_slice(plan_.copies, plan_.num_copies, i); });
  }
  const auto began = std::chrono::steady_clock::now();
  embed(worker);
  for (int i = 0; i < spec_.num_layers; ++i) run_layer(worker, i);
  if (num_chosen_ > 0) project_head(worker);
  const auto projected = std::chrono::steady_clock::now();
  if (num_chosen_ > 0) choose(worker);
  score(worker);
  if (worker.leads()) {
    const auto milliseconds = [](auto span) { return std::chrono::duration<float, std::milli>(span).count(); };
    plan_.times_ms[0] = milliseconds(projected - began);
    plan_.times_ms[1] = milliseconds(std::chrono::steady_clock::now() - projected);
    plan_.times_ms[2] = milliseconds(began - started);
  }
}

void Model::embed(Worker& worker) {
  const Matrix& table = embedding.rows ? embedding : head;
  worker.for_each(plan_.num_tokens, [&](int i) {
    float* row = hidden_row(i);
    table.get_row(plan_.token_ids[i], row);
    std::fill(row + spec_.hidden, row + hidden_stride_, 0.f);
  });
}

// Returns the normed hidden state of a token, which stays valid until this thread's next call.
const float* Model::normed(int token, const Norm& norm, bool* finite) const {
  thread_local std::vector<float> row;
  row.resize(hidden_stride_);
  const float *x = hidden_row(token), *weight = norm.weight.data();
  const int padded = hidden_stride_, count = spec_.hidden;
  *finite = spec_.has_layer_norms
                ? layer_norm(x, weight, norm.bias.data(), padded, count, spec_.norm_eps, row.data())
                : rms_norm(x, weight, padded, count, spec_.norm_eps, row.data());
  return row.data();
}

// Whether every thread writes all rows for itself. Not with adapters: all threads read the shrunk rows, but only one
// may write each of them.
bool Model::repeats(int rows) const { return rows <= kRowsToRepeat && !plan_.adapters; }

void Model::run_layer(Worker& worker, int index) {
  Layer& layer = layers_[index];
  const int num_tokens = plan_.num_tokens;
  const Activations& left = fill_rows(
      worker, inputs_, kNormed, layer.qkv.format, num_tokens, repeats(num_tokens), [&](Activations& left, int i) {
        bool finite;
        const float* x = normed(i, layer.attention_norm, &finite);
        left.set_row(i, x);
        shrink(i, i, index, Slot::kQkv, x);
      });
  multiply(worker, left, layer.qkv, [&](int first, int count, int panel, float* out) {
    expand(first, count, all_tokens_, index, Slot::kQkv, panel, out);
    for (int r = 0; r < count; ++r) std::copy_n(out + r * kPanel, kPanel, qkv_row(first + r) + panel * kPanel);
  });
  attend_all(worker, index);
  // After the last attention, only tokens whose logits are needed matter.
  if (index + 1 < spec_.num_layers) {
    run_tail(worker, index, all_tokens_, inputs_);
  } else if (!head_tokens_.empty()) {
    run_tail(worker, index, head_tokens_, last_inputs_);
  }
}

// Computes what follows the attention, for the tokens `rows`.
void Model::run_tail(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs) {
  if (spec_.is_parallel) {
    // The MLP comes first, because it reads the same hidden state as the attention.
    add_mlp(worker, index, rows, inputs);
    add_attended(worker, index, rows, inputs);
  } else {
    add_attended(worker, index, rows, inputs);
    add_mlp(worker, index, rows, inputs);
  }
}

void Model::add_product(Worker& worker, const Activations& left, int index, Slot slot, const std::vector<int>& rows) {
  multiply(worker, left, matrix(slot, index), [&](int first, int count, int panel, float* out) {
    expand(first, count, rows, index, slot, panel, out);
    for (int r = 0; r < count; ++r) {
      float* h = hidden_row(rows[first + r]) + panel * kPanel;
      for (int j = 0; j < kPanel; j += kLanes) store(h + j, load(h + j) + load(out + r * kPanel + j));
    }
  });
}

void Model::add_attended(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs) {
  const int num_rows = (int)rows.size();
  const Activations& attended = fill_rows(worker, inputs, kAttended, layers_[index].out.format, num_rows,
                                          repeats(num_rows), [&](Activations& left, int i) {
                                            left.set_row(i, attended_row(rows[i]));
                                            shrink(i, rows[i], index, Slot::kOut, attended_row(rows[i]));
                                          });
  add_product(worker, attended, index, Slot::kOut, rows);
}

void Model::add_mlp(Worker& worker, int index, const std::vector<int>& rows, std::vector<Inputs>& inputs) {
  Layer& layer = layers_[index];
  const int num_rows = (int)rows.size();
  const Activations& left = fill_rows(
      worker, inputs, kNormed, layer.mlp_in.format, num_rows, repeats(num_rows), [&](Activations& left, int i) {
        bool finite;
        const float* x = normed(rows[i], layer.mlp_norm, &finite);
        left.set_row(i, x);
        shrink(i, rows[i], index, Slot::kMlpIn, x);
      });
  multiply(worker, left, layer.mlp_in, [&](int first, int count, int panel, float* out) {
    expand(first, count, rows, index, Slot::kMlpIn, panel, out);
    for (int r = 0; r < count; ++r) activate(out + r * kPanel, panel, gated_row(first + r));
  });

  const Activations& gated = fill_rows(
      worker, inputs, kGated, layer.mlp_out.format, num_rows, repeats(num_rows), [&](Activations& left, int i) {
        thread_local std::vector<float> rotated;
        const float* row = gated_row(i);
        if (spec_.turned) {
          rotated.resize(gated_stride_);
          // Clear the padding: numbers that another model left there would enter this row's scale.
          std::fill(rotated.begin() + spec_.intermediate, rotated.end(), 0.f);
          gated_rotation_.apply(row, rotated.data());
          row = rotated.data();
        }
        left.set_row(i, row);
        shrink(i, rows[i], index, Slot::kMlpOut, row);
      });
  add_product(worker, gated, index, Slot::kMlpOut, rows);
}

// Applies the activation to one panel of the MLP's inner products, and writes the row that the second matrix reads.
void Model::activate(const float* inner, int panel, float* row) const {
  const auto activated = [&](Floats x) {
    switch ((Activation)spec_.activation) {
      case Activation::kGelu:
        return gelu(x);
      case Activation::kGeluTanh:
        return gelu_tanh(x);
      default:
        return silu(x);
    }
  };
  if (spec_.is_gated) {
    store(row + panel * kLanes, activated(load(inner)) * load(inner + kLanes));
  } else {
    for (int j = 0; j < kPanel; j += kLanes) store(row + panel * kPanel + j, activated(load(inner + j)));
  }
}

}  // namespace penstock
