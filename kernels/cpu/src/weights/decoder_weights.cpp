#include "weights/decoder_weights.h"

#include <algorithm>

#include "weights/norm.h"

namespace penstock {

Norm::Norm(const Spec& spec, bool is_present)
    : is_present_(is_present),
      is_layer_norm_(spec.has_layer_norms),
      count_(spec.hidden),
      padded_(round_up(spec.hidden, kPanel)),
      eps_(spec.norm_eps) {
  if (!is_present_) return;
  weight.reserve(padded_);
  if (is_layer_norm_) bias.reserve(padded_);
}

NormedRow Norm::apply(const float* row) const {
  if (!is_present_) return {row, true};
  thread_local std::vector<float> normed;
  normed.resize(padded_);
  const bool is_finite = write(row, normed.data());
  return {normed.data(), is_finite};
}

bool Norm::write(const float* row, float* out) const {
  return is_layer_norm_ ? layer_norm(row, weight.data(), bias.data(), padded_, count_, eps_, out)
                        : rms_norm(row, weight.data(), padded_, count_, eps_, out);
}

DecoderWeights::DecoderWeights(const Spec& spec, const LayerSpec* layers)
    : final_norm(spec, spec.has_final_norm),
      embedding_norm(spec, spec.has_embedding_norm),
      is_rotated_(spec.hadamard_rotation),
      hidden_(spec.hidden),
      hidden_rotation_(is_rotated_ ? spec.hidden : 1) {
  positions.ropes.resize(spec.num_ropes);
  positions.query_factors.resize(spec.num_query_growths);
  this->layers.reserve(spec.num_layers);
  for (int i = 0; i < spec.num_layers; ++i) {
    this->layers.emplace_back(spec, layers[i], i);
    if (is_rotated_ && layers[i].has_mlp())
      gated_rotations_.try_emplace(layers[i].intermediate, layers[i].intermediate);
  }
}

Matrix& DecoderWeights::matrix(Slot slot, int layer) {
  switch (slot) {
    case Slot::kEmbedding:
      return embedding;
    case Slot::kHead:
      return head;
    case Slot::kTokenInputs:
      return token_inputs;
    default:
      return layers[layer].matrix(slot);
  }
}

std::pair<int, int> DecoderWeights::shape_of(Slot slot, int layer) {
  if (slot == Slot::kGates) return {2 * layers[layer].spec.value_heads, hidden_};
  const Matrix& found = matrix(slot, layer);
  return {found.rows, found.columns};
}

void DecoderWeights::fill(Team& team, Slot slot, int layer, const Part& part, const float* gains) {
  penstock::fill(team, matrix(slot, layer), part, transform_of(slot, layer, gains));
}

void DecoderWeights::set_bias(Slot slot, int layer, RowLayout layout, int first, const float* values, int count) {
  Matrix& target = matrix(slot, layer);
  target.bias.reserve((size_t)target.num_panels() * kPanel);
  for (int i = 0; i < count; ++i) target.bias[packed_row(layout, first, i)] = values[i];
  const HadamardRotation* rotation = transform_of(slot, layer, nullptr).outputs;
  if (rotation) rotation->apply(target.bias.data(), target.bias.data());
}

void DecoderWeights::write_final(const float* normed, float* out) const {
  if (!is_rotated_) {
    std::copy_n(normed, hidden_, out);
    return;
  }
  thread_local std::vector<float> restored;
  restored.assign(normed, normed + round_up(hidden_, kPanel));
  hidden_rotation_.invert(restored.data());
  for (int i = 0; i < hidden_; ++i) out[i] = restored[i] * final_gains[i];
}

WeightTransform DecoderWeights::transform_of(Slot slot, int layer, const float* gains) const {
  if (!is_rotated_) return {nullptr, nullptr, nullptr};
  switch (slot) {
    case Slot::kOut:
      return {nullptr, nullptr, &hidden_rotation_};
    case Slot::kMlpOut:
      return {nullptr, gated_rotation(layers[layer]), &hidden_rotation_};
    default:
      return {gains, &hidden_rotation_, nullptr};
  }
}

}  // namespace penstock
