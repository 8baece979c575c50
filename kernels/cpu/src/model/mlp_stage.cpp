#include "model/mlp_stage.h"

#include <algorithm>

namespace penstock {

namespace {

// Calls `use` with the function of an activation.
template <class Use>
void with_activation(Activation kind, const Use& use) {
  switch (kind) {
    case Activation::kGelu:
      return use([](Floats x) { return gelu(x); });
    case Activation::kGeluTanh:
      return use([](Floats x) { return gelu_tanh(x); });
    case Activation::kRelu2:
      return use([](Floats x) { return squared_relu(x); });
    default:
      return use([](Floats x) { return silu(x); });
  }
}

// Applies the activation of an MLP without a gate to `count` numbers, a multiple of 16.
void activate_all(const LayerSpec& spec, const float* inner, int count, float* out) {
  const Floats factor = broadcast(spec.mlp_factor);
  with_activation((Activation)spec.activation, [&](const auto& function) {
    for (int i = 0; i < count; i += kLanes) {
      const Floats value = function(load(inner + i));
      store(out + i, spec.mlp_factor != 1 ? value * factor : value);
    }
  });
}

}  // namespace

void MlpStage::run(Worker& worker, const Layer& layer, LayerProducts& products, const RowBuffer* mixed,
                   const Norm* pending) const {
  const auto normed = [&](int i) {
    float* row = buffers_.hidden.row(products.tokens()[i]);
    if (pending) pending->apply_in_place(row);
    return layer.mlp_norm.apply(row).values;
  };
  // What a token's own embedding adds comes later.
  const bool is_last = !layer.token_norm.is_present();
  const float factor = is_last ? layer.output_factor() : 1.f;
  if (!layer.spec.is_gated && !mixed && !weights_.gated_rotation(layer) &&
      products.takes_columns(layer, Slot::kMlpOut)) {
    // A panel of activated numbers is a group of the second product's inputs.
    products.run(worker, layer, Slot::kMlpIn, normed, [&](int first, int count, int panel, const float* out) {
      alignas(64) float active[kMaxRows * kPanel];
      activate_all(layer.spec, out, count * kPanel, active);
      products.set_input(layer, Slot::kMlpOut, first, count, panel, active);
    });
    return products.add(worker, layer, Slot::kMlpOut, products.kInputsAreSet, layer.mlp_output_norm, factor);
  }
  products.run(worker, layer, Slot::kMlpIn, normed, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      activate(layer.spec, layer.spec.intermediate, out + r * kPanel, panel, buffers_.gated.row(first + r));
    }
  });
  group_.meet(worker);
  const HadamardRotation* rotation = weights_.gated_rotation(layer);
  const auto gated = [&](int i) { return gated_row(layer, rotation, i); };
  if (!mixed) return products.add(worker, layer, Slot::kMlpOut, gated, layer.mlp_output_norm, factor);
  products.add_normed(worker, layer, Slot::kMlpOut, gated, layer.mlp_output_norm, factor, [&](int i, float* row) {
    std::copy_n(layer.dense_output_norm.apply(row).values, mixed->stride(), row);
    add_scaled(mixed->row(i), 1, mixed->stride(), row);
  });
}

namespace {

// A NaN is the second operand of each minimum and maximum, which then return it.
Floats clamped_gate(const LayerSpec& spec, Floats gate, Floats up) {
  const Floats limit = broadcast(spec.gate_limit);
  gate = min(limit, gate);
  up = max(zeros() - limit, min(limit, up));
  return gated_by(gate, broadcast(spec.gate_slope) * gate) * (up + broadcast(1.f));
}

}  // namespace

Floats activated(Activation kind, Floats x) {
  with_activation(kind, [&](const auto& function) { x = function(x); });
  return x;
}

void activate(const LayerSpec& spec, int size, const float* inner, int panel, float* row) {
  const auto kind = (Activation)spec.activation;
  if (spec.is_gated) {
    const Floats up = load(inner + kLanes);
    Floats gate = load(inner);
    if (spec.gate_factor != 1) gate = gate * broadcast(spec.gate_factor);
    Floats gated = spec.gate_limit > 0 ? clamped_gate(spec, gate, up) : activated(kind, gate) * up;
    if (spec.mlp_factor != 1) gated = gated * broadcast(spec.mlp_factor);
    store(row + panel * kLanes, gated);
    const int panels = spec.inner_panels(size);
    if (panel + 1 == panels && panels % 2) store(row + panels * kLanes, zeros());
  } else {
    activate_all(spec, inner, kPanel, row + panel * kPanel);
  }
}

// Returns the input of the second matrix, which stays valid until this thread's next call.
const float* MlpStage::gated_row(const Layer& layer, const HadamardRotation* rotation, int row) const {
  const float* gated = buffers_.gated.row(row);
  if (!rotation) return gated;
  thread_local std::vector<float> rotated;
  rotated.resize(buffers_.gated.stride());
  // Clear the padding: numbers that another model left there would enter this row's scale.
  std::fill(rotated.begin() + layer.spec.intermediate, rotated.end(), 0.f);
  rotation->apply(gated, rotated.data());
  return rotated.data();
}

}  // namespace penstock
