#include "model/mlp_stage.h"

#include <algorithm>

namespace penstock {

void MlpStage::run(Worker& worker, const Layer& layer, LayerProducts& products, const RowBuffer* mixed) const {
  const auto normed = [&](int i) { return layer.mlp_norm.apply(buffers_.hidden.row(products.tokens()[i])).values; };
  products.run(worker, layer, Slot::kMlpIn, normed, [&](int first, int count, int panel, const float* out) {
    for (int r = 0; r < count; ++r) {
      activate(layer.spec, layer.spec.intermediate, out + r * kPanel, panel, buffers_.gated.row(first + r));
    }
  });
  group_.meet(worker);
  const HadamardRotation* rotation = weights_.gated_rotation(layer);
  const auto gated = [&](int i) { return gated_row(layer, rotation, i); };
  // What a token's own embedding adds comes later.
  const bool is_last = !layer.token_norm.is_present();
  const float factor = is_last ? layer.output_factor() : 1.f;
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
  switch (kind) {
    case Activation::kGelu:
      return gelu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kRelu2:
      return squared_relu(x);
    default:
      return silu(x);
  }
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
    for (int j = 0; j < kPanel; j += kLanes) {
      const Floats value = activated(kind, load(inner + j));
      store(row + panel * kPanel + j, spec.mlp_factor != 1 ? value * broadcast(spec.mlp_factor) : value);
    }
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
