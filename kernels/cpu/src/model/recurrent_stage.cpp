#include "model/recurrent_stage.h"

#include <algorithm>
#include <cmath>

#include "weights/norm.h"

namespace penstock {
namespace {

constexpr float kLengthEps = 1e-6f;  // added to the squared length of queries and keys
constexpr int kShortChannels = 4 * kLanes;
constexpr int kConvolvedChannels = 8 * kLanes;  // of a state space, by one thread

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// log(1 + e^x), without overflow.
double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }

// Scales a row to length `length`.
void set_length(float* row, int count, float length) {
  Floats squares = zeros();
  for (int i = 0; i < count; i += kLanes) squares = fma(load(row + i), load(row + i), squares);
  const Floats factor = broadcast(length / std::sqrt(sum(squares) + kLengthEps));
  for (int i = 0; i < count; i += kLanes) store(row + i, load(row + i) * factor);
}

// Lets some columns of a value head's matrix decay and learn a token's value, and writes what the query finds.
// state: [key_dim][kStateColumns]. Rows of even and odd index are summed apart, so that sums wait for each other less.
void learn_token(float* state, int key_dim, const float* query, const float* key, const float* value, float learning,
                 float decay, float* out) {
  Floats known[2][2] = {{zeros(), zeros()}, {zeros(), zeros()}};
  for (int i = 0; i < key_dim; i += 2) {
    for (int odd = 0; odd < 2; ++odd) {
      const float* row = state + (i + odd) * kStateColumns;
      const Floats weight = broadcast(key[i + odd]);
      for (int v = 0; v < 2; ++v) known[odd][v] = fma(weight, load(row + v * kLanes), known[odd][v]);
    }
  }
  const Floats kept = broadcast(decay), forgotten = broadcast(-decay), rate = broadcast(learning);
  Floats error[2], found[2][2] = {{zeros(), zeros()}, {zeros(), zeros()}};
  for (int v = 0; v < 2; ++v) {
    error[v] = fma(forgotten, known[0][v] + known[1][v], load(value + v * kLanes)) * rate;
  }
  for (int i = 0; i < key_dim; i += 2) {
    for (int odd = 0; odd < 2; ++odd) {
      float* row = state + (i + odd) * kStateColumns;
      const Floats weight = broadcast(key[i + odd]), read = broadcast(query[i + odd]);
      for (int v = 0; v < 2; ++v) {
        const Floats learned = fma(weight, error[v], kept * load(row + v * kLanes));
        store(row + v * kLanes, learned);
        found[odd][v] = fma(read, learned, found[odd][v]);
      }
    }
  }
  for (int v = 0; v < 2; ++v) store(out + v * kLanes, found[0][v] + found[1][v]);
}

// Lets some columns of a state space's matrix decay, adds a token to them, and writes what is read of them.
// state: [rows][kVectors * kLanes]; value: already times the token's duration. Rows of even and odd index are summed apart.
template <int kVectors>
void add_token(float* state, int rows, const float* read, const float* write, const Floats* value, float decay,
               float* out) {
  Floats found[2][kVectors];
  for (int v = 0; v < kVectors; ++v) found[0][v] = found[1][v] = zeros();
  const Floats kept = broadcast(decay);
  for (int i = 0; i < rows; i += 2) {
    for (int odd = 0; odd < 2; ++odd) {
      float* row = state + (i + odd) * kVectors * kLanes;
      const Floats written = broadcast(write[i + odd]), wanted = broadcast(read[i + odd]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats added = fma(written, value[v], kept * load(row + v * kLanes));
        store(row + v * kLanes, added);
        found[odd][v] = fma(wanted, added, found[odd][v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, found[0][v] + found[1][v]);
}

}  // namespace

RecurrentStage::RecurrentStage(const Spec& spec, const LayerSpec* layers, const Step& step, const Adapters& adapters,
                               const StepBuffers& buffers)
    : step_(step), adapters_(adapters), buffers_(buffers), hidden_stride_(round_up(spec.hidden, kPanel)) {
  for (int i = 0; i < spec.num_layers; ++i) {
    first_numbers_.push_back(slot_numbers_);
    slot_numbers_ += layers[i].state_numbers();
  }
  states_ = Buffer<float>(slot_numbers_ * spec.num_state_slots);
  zeros_.reserve(largest_of_layers(spec, layers, [](const LayerSpec& layer) { return layer.channels; }));
}

void RecurrentStage::prepare() {
  if (slot_numbers_ == 0) return;
  const Plan& plan = step_.plan;
  if (plan.adapters) inner_.reserve((size_t)plan.num_tokens * adapters_.largest_rank());
  tokens_.clear();
  for (int seq = 0, save = 0; seq < plan.num_seqs; ++seq) {
    Tokens tokens{plan.query_starts[seq], plan.query_starts[seq + 1], save, save};
    while (save < plan.num_saves && plan.state_saves[2 * save] < tokens.end) ++save;
    tokens.end_save = save;
    tokens_.push_back(tokens);
  }
}

void RecurrentStage::mix(Worker& worker, const Layer& layer) {
  const LayerSpec& spec = layer.spec;
  const int num_seqs = (int)tokens_.size(), num_tokens = step_.plan.num_tokens;
  if (spec.is_state_space) return mix_states(worker, layer);
  if (!spec.has_states()) {
    const int blocks = (spec.channels + kShortChannels - 1) / kShortChannels;
    worker.for_each(num_seqs * blocks, [&](int i) {
      const int first = i % blocks * kShortChannels;
      mix_short(layer, i / blocks, first, std::min(kShortChannels, spec.channels - first));
    });
    return;
  }
  const int blocks = spec.value_dim / kStateColumns, columns = spec.value_heads * blocks;
  worker.for_each(num_tokens + num_seqs * spec.key_heads, [&](int i) {
    if (i < num_tokens) return set_gates(layer, i);
    convolve_head(layer, (i - num_tokens) / spec.key_heads, (i - num_tokens) % spec.key_heads);
  });
  worker.for_each(num_seqs * columns,
                  [&](int i) { learn(layer, i / columns, i % columns / blocks, i % columns % blocks); });
  worker.for_each(num_tokens * spec.value_heads,
                  [&](int i) { gate_head(layer, i / spec.value_heads, i % spec.value_heads); });
}

void RecurrentStage::mix_states(Worker& worker, const Layer& layer) {
  const LayerSpec& spec = layer.spec;
  const int num_seqs = (int)tokens_.size(), num_tokens = step_.plan.num_tokens;
  const int parts = (spec.channels + kConvolvedChannels - 1) / kConvolvedChannels;
  worker.for_each(num_tokens + num_seqs * parts, [&](int i) {
    if (i < num_tokens) return set_durations(layer, i);
    const int first = (i - num_tokens) % parts * kConvolvedChannels;
    convolve_channels(layer, (i - num_tokens) / parts, first, std::min(kConvolvedChannels, spec.channels - first));
  });
  const int blocks = (spec.value_dim + kStateColumns - 1) / kStateColumns, columns = spec.value_heads * blocks;
  worker.for_each(num_seqs * columns, [&](int i) {
    const int head = i % columns / blocks, block = i % columns % blocks;
    if (spec.value_dim - block * kStateColumns >= kStateColumns) return scan<2>(layer, i / columns, head, block);
    scan<1>(layer, i / columns, head, block);
  });
  worker.for_each(num_tokens * spec.key_heads,
                  [&](int i) { gate_group(layer, i / spec.key_heads, i % spec.key_heads); });
}

// Computes how long a token lasts for each head, and what is left of the head's state.
void RecurrentStage::set_durations(const Layer& layer, int token) const {
  const int heads = layer.spec.value_heads;
  const float* given = inputs_of(layer, token) + layer.spec.channels;
  float* gates = buffers_.gates.row(token);
  for (int head = 0; head < heads; ++head) {
    const double given_duration = (double)given[head] * layer.spec.duration_factor;
    const double duration = softplus(given_duration + layer.recurrent.decay_biases[head]);
    gates[head] = (float)duration;
    gates[heads + head] = (float)std::exp(duration * layer.recurrent.decay_rates[head]);
  }
}

// Computes how far each value head learns from a token, and what is left of its state.
void RecurrentStage::set_gates(const Layer& layer, int token) const {
  const RecurrentWeights& weights = layer.recurrent;
  const float* normed = layer.attention_norm.apply(buffers_.hidden.row(token)).values;
  float* gates = buffers_.gates.row(token);
  const int heads = layer.spec.value_heads;
  for (int i = 0; i < 2 * heads; ++i) {
    const float* row = weights.gates.data() + (size_t)i * hidden_stride_;
    Floats sums = zeros();
    for (int c = 0; c < hidden_stride_; c += kLanes) sums = fma(load(normed + c), load(row + c), sums);
    gates[i] = sum(sums);
  }
  adapt_gates(layer, token, normed, gates);
  for (int head = 0; head < heads; ++head) {
    const double decay = weights.decay_rates[head] * softplus((double)gates[heads + head] + weights.decay_biases[head]);
    gates[head] = (float)sigmoid(gates[head]);
    gates[heads + head] = (float)std::exp(decay);
  }
}

// Adds what the adapter of a token's sequence adds to the products of both gates. gates: padded to whole panels.
void RecurrentStage::adapt_gates(const Layer& layer, int token, const float* normed, float* gates) const {
  const int adapter_slot = step_.adapter_slot(token);
  const LowRank* adapter = adapter_slot < 0 ? nullptr : adapters_.find(adapter_slot, layer.index, Slot::kGates);
  if (!adapter) return;
  float* inner = inner_.data() + (size_t)token * adapters_.largest_rank();
  adapter->shrink(normed, inner);
  for (int panel = 0; panel * kPanel < 2 * layer.spec.value_heads; ++panel) {
    adapter->expand(inner, panel, gates + panel * kPanel);
  }
}

// Convolves the query, the key and the values that belong to a key head, at all tokens of a sequence.
void RecurrentStage::convolve_head(const Layer& layer, int seq, int head) const {
  const LayerSpec& spec = layer.spec;
  const int dim = spec.key_dim, keys = spec.key_heads * dim, group = spec.value_heads / spec.key_heads * spec.value_dim;
  convolve_channels(layer, seq, head * dim, dim);
  convolve_channels(layer, seq, keys + head * dim, dim);
  convolve_channels(layer, seq, 2 * keys + head * group, group);
  for (int token = tokens_[seq].begin; token < tokens_[seq].end; ++token) {
    float* row = buffers_.mixed.row(token) + head * dim;
    set_length(row, dim, 1 / std::sqrt((float)dim));
    set_length(row + keys, dim, 1);
  }
}

void RecurrentStage::convolve_channels(const Layer& layer, int seq, int first, int count) const {
  const int taps = layer.spec.taps, channels = layer.spec.channels;
  const Tokens& tokens = tokens_[seq];
  const float* before = state_of(layer, step_.plan.state_reads[seq]);
  const float* bias = layer.recurrent.bias.count() ? layer.recurrent.bias.data() : zeros_.data();
  const float* inputs[kMaxTaps];
  for (int token = tokens.begin; token < tokens.end; ++token) {
    for (int tap = 0; tap < taps; ++tap) {
      const int at = token - (taps - 1) + tap, missing = tokens.begin - at;
      if (missing <= 0) {
        inputs[tap] = inputs_of(layer, at);
      } else {
        inputs[tap] = before ? before + (size_t)(taps - 1 - missing) * channels : zeros_.data();
      }
    }
    float* out = buffers_.mixed.row(token);
    for (int c = first; c < first + count; c += kLanes) {
      Floats total = load(bias + c);
      for (int tap = 0; tap < taps; ++tap) {
        total =
            fma(load(layer.recurrent.convolution.data() + (size_t)tap * channels + c), load(inputs[tap] + c), total);
      }
      store(out + c, silu(total));
    }
  }
  keep_inputs(layer, seq, first, count);
}

// Writes the last inputs of some channels to the slots that the plan names. A slot that is read is written last, and
// then its rows move only forward.
void RecurrentStage::keep_inputs(const Layer& layer, int seq, int first, int count) const {
  const int known = layer.spec.taps - 1, channels = layer.spec.channels;
  const Tokens& tokens = tokens_[seq];
  const Plan& plan = step_.plan;
  const float* before = state_of(layer, plan.state_reads[seq]);
  const auto keep = [&](int token, float* state) {
    for (int i = 0; i < known; ++i) {
      const int at = token - (known - 1) + i, missing = tokens.begin - at;
      const float* row = missing <= 0 ? inputs_of(layer, at)
                         : before     ? before + (size_t)(known - missing) * channels
                                      : zeros_.data();
      std::copy_n(row + first, count, state + (size_t)i * channels + first);
    }
  };
  for (int save = tokens.first_save; save < tokens.end_save; ++save) {
    keep(plan.state_saves[2 * save], state_of(layer, plan.state_saves[2 * save + 1]));
  }
  keep(tokens.end - 1, state_of(layer, plan.state_writes[seq]));
}

// Continues some columns of a value head's matrix by all tokens of a sequence.
void RecurrentStage::learn(const Layer& layer, int seq, int head, int block) const {
  const LayerSpec& spec = layer.spec;
  const Plan& plan = step_.plan;
  const Tokens& tokens = tokens_[seq];
  const int dim = spec.key_dim, keys = spec.key_heads * dim, size = dim * kStateColumns;
  const size_t first = known_numbers(spec) + ((size_t)head * (spec.value_dim / kStateColumns) + block) * size;
  const auto columns_of = [&](int slot) {
    float* state = state_of(layer, slot);
    return state ? state + first : nullptr;
  };
  const float* before = columns_of(plan.state_reads[seq]);
  float* state = columns_of(plan.state_writes[seq]);
  if (!before) {
    std::fill_n(state, size, 0.f);
  } else if (before != state) {
    std::copy_n(before, size, state);
  }
  const int key_head = spec.key_head_of(head), column = head * spec.value_dim + block * kStateColumns;
  int save = tokens.first_save;
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const float *row = buffers_.mixed.row(token), *gates = buffers_.gates.row(token);
    learn_token(state, dim, row + key_head * dim, row + keys + key_head * dim, row + 2 * keys + column, gates[head],
                gates[spec.value_heads + head], output_row(layer, token) + column);
    if (save < tokens.end_save && plan.state_saves[2 * save] == token) {
      std::copy_n(state, size, columns_of(plan.state_saves[2 * save++ + 1]));
    }
  }
}

// Continues some columns of a state space's matrix by all tokens of a sequence.
template <int kVectors>
void RecurrentStage::scan(const Layer& layer, int seq, int head, int block) const {
  const LayerSpec& spec = layer.spec;
  const Plan& plan = step_.plan;
  const Tokens& tokens = tokens_[seq];
  const int rows = spec.key_dim, size = rows * kVectors * kLanes, group = spec.key_head_of(head);
  const size_t first = known_numbers(spec) + ((size_t)head * spec.value_dim + block * kStateColumns) * rows;
  const auto columns_of = [&](int slot) {
    float* state = state_of(layer, slot);
    return state ? state + first : nullptr;
  };
  const float* before = columns_of(plan.state_reads[seq]);
  float* state = columns_of(plan.state_writes[seq]);
  if (!before) {
    std::fill_n(state, size, 0.f);
  } else if (before != state) {
    std::copy_n(before, size, state);
  }
  const int column = head * spec.value_dim + block * kStateColumns, outputs = spec.mixed();
  int save = tokens.first_save;
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const float *row = buffers_.mixed.row(token), *gates = buffers_.gates.row(token);
    const float *write = row + outputs + group * rows, *read = write + spec.key_heads * rows;
    Floats value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = load(row + column + v * kLanes) * broadcast(gates[head]);
    add_token<kVectors>(state, rows, read, write, value, gates[spec.value_heads + head],
                        output_row(layer, token) + column);
    if (save < tokens.end_save && plan.state_saves[2 * save] == token) {
      std::copy_n(state, size, columns_of(plan.state_saves[2 * save++ + 1]));
    }
  }
}

// Adds their share of the values to what a group of heads has read for a token, gates it, and norms it.
void RecurrentStage::gate_group(const Layer& layer, int token, int group) const {
  const LayerSpec& spec = layer.spec;
  const int heads = spec.value_heads / spec.key_heads, width = heads * spec.value_dim, first = group * width;
  float* row = output_row(layer, token);
  const float *values = buffers_.mixed.row(token), *gates = input_row(layer, token);
  for (int c = first; c < first + width; c += kLanes) {
    const Floats skip = broadcast(layer.recurrent.skips[c / spec.value_dim]);
    const Floats gate = silu(load(gates + c) * broadcast(spec.state_gate_factor));
    store(row + c, fma(skip, load(values + c), load(row + c)) * gate);
  }
  if (const Buffer<float>& norm = layer.recurrent.norm; norm.count()) {
    rms_norm(row + first, norm.data() + first, width, width, spec.head_norm_eps, row + first);
  }
  const Floats factor = broadcast(spec.mixer_factor);
  for (int c = first; spec.mixer_factor != 1 && c < first + width; c += kLanes) store(row + c, load(row + c) * factor);
  // A wider layer may have left numbers behind the last channel.
  if (first + width == spec.mixed()) std::fill(row + spec.mixed(), row + round_up(spec.mixed(), kPanel), 0.f);
}

// Norms what a value head has found for a token, and gates it.
void RecurrentStage::gate_head(const Layer& layer, int token, int head) const {
  const LayerSpec& spec = layer.spec;
  float* found = output_row(layer, token) + head * spec.value_dim;
  const float* gate = input_row(layer, token) + spec.channels + head * spec.value_dim;
  rms_norm(found, layer.recurrent.norm.data(), spec.value_dim, spec.value_dim, spec.head_norm_eps, found);
  for (int c = 0; c < spec.value_dim; c += kLanes) store(found + c, load(found + c) * silu(load(gate + c)));
}

// Mixes some channels of a short convolution at all tokens of a sequence.
void RecurrentStage::mix_short(const Layer& layer, int seq, int first, int count) const {
  const int taps = layer.spec.taps, known = taps - 1, channels = layer.spec.channels;
  const Plan& plan = step_.plan;
  const Tokens& tokens = tokens_[seq];
  alignas(64) float inputs[kMaxTaps][kShortChannels];  // by token modulo the taps
  const float* before = state_of(layer, plan.state_reads[seq]);
  for (int i = 0; i < known; ++i) {
    const float* row = before ? before + (size_t)i * channels : zeros_.data();
    std::copy_n(row + first, count, inputs[i]);
  }
  const float* bias = layer.recurrent.bias.count() ? layer.recurrent.bias.data() : zeros_.data();
  const auto keep = [&](int end, int slot) {
    float* state = state_of(layer, slot);
    for (int i = 0; i < known; ++i) std::copy_n(inputs[(end + i) % taps], count, state + (size_t)i * channels + first);
  };
  const bool is_last = first + count == channels;
  int save = tokens.first_save;
  for (int token = tokens.begin; token < tokens.end; ++token) {
    const int at = token - tokens.begin;  // the oldest input of this token lies at `at % taps`
    const float *row = input_row(layer, token) + first, *values = row + 2 * channels;
    float *own = inputs[(at + known) % taps], *out = output_row(layer, token);
    for (int c = 0; c < count; c += kLanes) {
      store(own + c, load(row + c) * load(values + c));
      Floats total = load(bias + first + c);
      for (int tap = 0; tap < taps; ++tap) {
        const float* weights = layer.recurrent.convolution.data() + (size_t)tap * channels + first;
        total = fma(load(weights + c), load(inputs[(at + tap) % taps] + c), total);
      }
      store(out + first + c, load(row + channels + c) * total);
    }
    // A wider layer may have left numbers behind the last channel.
    if (is_last) std::fill(out + channels, out + round_up(channels, kPanel), 0.f);
    if (save < tokens.end_save && plan.state_saves[2 * save] == token) keep(at + 1, plan.state_saves[2 * save++ + 1]);
  }
  keep(tokens.end - tokens.begin, plan.state_writes[seq]);
}

}  // namespace penstock
