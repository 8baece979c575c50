#include "model/expert_stage.h"

#include <algorithm>
#include <cmath>

#include "model/mlp_stage.h"

namespace penstock {
namespace {

constexpr float kSharesEps = 1e-6f;  // added to the sum by which sigmoid shares are divided

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

void ExpertStage::prepare(const Layer& layer, int rows) {
  const int entries = rows * layer.spec.entries_per_token();
  input_.rows.prepare(entries, layer.matrix(layer.expert_in()));
  gated_input_.rows.prepare(entries, layer.matrix(layer.expert_out()));
  for (Input* input : {&input_, &gated_input_}) {
    input->rows.tiling().reserve(entries);
    input->groups.reserve(layer.spec.all_experts());
  }
  normed_.reserve(rows);
  if (group_.is_alone()) gated_.reserve(entries);
  outputs_.reserve(entries);
  if (layer.spec.has_mixture()) sums_.reserve(rows);
  ends_.reserve(layer.spec.all_experts());
  if ((int)choices_.size() >= entries) return;
  choices_.resize(entries);
  rows_.resize(entries);
  entries_.resize(entries);
}

void ExpertStage::run(Worker& worker, const Layer& layer, const std::vector<int>& tokens) {
  const Matrix &in = layer.matrix(layer.expert_in()), &out = layer.matrix(layer.expert_out());
  const int rows = (int)tokens.size(), entries = rows * layer.spec.entries_per_token();
  worker.for_each(rows, [&](int i) { route(layer, buffers_.hidden.row(tokens[i]), i); });
  if (worker.leads()) {
    sort(layer, rows);
    cut(input_, in);
    cut(gated_input_, out);
  }
  worker.for_each(0, [](int) {});  // the other threads wait at this barrier
  worker.for_each(entries, [&](int i) { input_.rows.set_row(i, normed_.row(rows_[i])); });
  const int size = layer.spec.expert_size();
  multiply_groups(worker, input_, layer, layer.expert_in(), [&](int first, int count, int panel, const float* inner) {
    for (int r = 0; r < count; ++r) activate(layer.spec, size, inner + r * kPanel, panel, gated_.row(first + r));
  });
  group_.meet(worker);
  worker.for_each(entries, [&](int i) { gated_input_.rows.set_row(i, gated_.row(i)); });
  multiply_groups(worker, gated_input_, layer, layer.expert_out(),
                  [&](int first, int count, int panel, const float* product) {
                    for (int r = 0; r < count; ++r) {
                      copy_panel(product + r * kPanel, outputs_.row(first + r) + panel * kPanel);
                    }
                  });
  worker.for_each(rows, [&](int i) {
    if (layer.spec.has_mixture()) {
      keep_outputs(layer, i);
    } else {
      add_outputs(layer, i, spec_.residual_scale, buffers_.hidden.row(tokens[i]));
    }
  });
}

void ExpertStage::route(const Layer& layer, const float* hidden, int row) {
  const int count = layer.spec.num_experts, per_token = layer.spec.experts_per_token, columns = normed_.stride();
  const Norm& norm = layer.spec.has_mixture() ? layer.expert_norm : layer.mlp_norm;
  std::copy_n(norm.apply(hidden).values, columns, normed_.row(row));
  const float* read = layer.router_norm.is_present() ? layer.router_norm.apply(hidden).values : normed_.row(row);
  thread_local std::vector<float> shares;
  shares.resize(count);
  for (int e = 0; e < count; ++e) {
    shares[e] = score(layer.router.data() + (size_t)e * columns, read);
    if (layer.router_bias.count()) shares[e] += layer.router_bias[e];
  }
  float total = 0;
  if (layer.spec.shares_by_sigmoid) {
    for (float& share : shares) share = sigmoid(share);
  } else {
    const float largest = *std::max_element(shares.begin(), shares.end());
    for (float& share : shares) total += share = std::exp(share - largest);
  }
  const auto rank_of = [&](int e) { return layer.choice_bias.count() ? shares[e] + layer.choice_bias[e] : shares[e]; };
  Choice* chosen = &choices_[(size_t)row * layer.spec.entries_per_token()];
  float chosen_total = 0;
  for (int k = 0; k < per_token; ++k) {
    int best = -1;
    for (int e = 0; e < count; ++e) {
      const bool is_taken = std::any_of(chosen, chosen + k, [&](const Choice& c) { return c.expert == e; });
      // The first expert that is left is taken even if its share is NaN.
      if (!is_taken && (best < 0 || rank_of(e) > rank_of(best))) best = e;
    }
    chosen[k] = {best, shares[best]};
    chosen_total += shares[best];
  }
  for (int k = 0; k < per_token; ++k) {
    if (!layer.spec.shares_by_sigmoid) {
      chosen[k].weight /= layer.spec.normalizes_experts ? chosen_total : total;
    } else if (layer.spec.normalizes_experts) {
      chosen[k].weight *= layer.spec.expert_scale / (chosen_total + kSharesEps);
    } else {
      chosen[k].weight *= layer.spec.expert_scale;
    }
    if (layer.expert_factors.count()) chosen[k].weight *= layer.expert_factors[chosen[k].expert];
  }
  if (layer.spec.shared_experts == 0) return;
  const float weight = layer.shared_gate.count() ? sigmoid(score(layer.shared_gate.data(), normed_.row(row))) : 1.f;
  for (int k = 0; k < layer.spec.shared_experts; ++k) chosen[per_token + k] = {count + k, weight};
}

// The product of a normed hidden state with a vector.
float ExpertStage::score(const float* weights, const float* input) const {
  Floats products = zeros();
  for (int c = 0; c < normed_.stride(); c += kLanes) products = fma(load(input + c), load(weights + c), products);
  return sum(products);
}

void ExpertStage::sort(const Layer& layer, int rows) {
  const int entries = rows * layer.spec.entries_per_token();
  ends_.assign(layer.spec.all_experts(), 0);
  for (int i = 0; i < entries; ++i) ++ends_[choices_[i].expert];
  int end = 0;
  for (int& count : ends_) {
    const int begin = end;
    end += count;
    count = begin;
  }
  for (int i = 0; i < entries; ++i) {
    const int entry = ends_[choices_[i].expert]++;
    entries_[i] = entry;
    rows_[entry] = i / layer.spec.entries_per_token();
  }
}

void ExpertStage::cut(Input& input, const Matrix& matrix) const {
  // The memory for these rows is reserved already.
  input.rows.prepare(ends_.back(), matrix);
  Tiling& tiling = input.rows.tiling();
  tiling.clear();
  input.groups.clear();
  for (int expert = 0, begin = 0; expert < (int)ends_.size(); begin = ends_[expert++]) {
    if (ends_[expert] == begin) continue;
    const int first_tile = tiling.tiles();
    tiling.add_group(ends_[expert] - begin, matrix.encoding());
    input.groups.push_back({expert, first_tile, tiling.tiles()});
  }
}

template <class Finish>
void ExpertStage::multiply_groups(Worker& worker, const Input& input, const Layer& layer, Slot slot,
                                  const Finish& finish) const {
  const Matrix& matrix = layer.matrix(slot);
  const PanelSet& own = share_.panels(layer.index, slot);
  const int panels_of_expert = matrix.num_panels() / layer.spec.all_experts(), panels = own.count();
  worker.for_each((int)input.groups.size() * panels, [&](int i) {
    const Group& group = input.groups[i / panels];
    const int first_panel = group.expert * panels_of_expert;
    multiply_panel(
        input.rows, group.begin, group.end, group.end - group.begin, matrix, first_panel + own.at(i % panels),
        [&](int first, int count, int panel, const float* out) { finish(first, count, panel - first_panel, out); });
  });
}

void ExpertStage::keep_outputs(const Layer& layer, int row) const {
  float* sum = sums_.row(row);
  std::fill_n(sum, sums_.stride(), 0.f);
  add_outputs(layer, row, 1, sum);
  std::copy_n(layer.expert_output_norm.apply(sum).values, sums_.stride(), sum);
}

void ExpertStage::add_outputs(const Layer& layer, int row, float scale, float* sum) const {
  const Span own = share_.hidden();
  const int count = layer.spec.entries_per_token();
  for (int k = 0; k < count; ++k) {
    const size_t choice = (size_t)row * count + k;
    const float weight = choices_[choice].weight * scale;
    add_scaled(outputs_.row(entries_[choice]) + own.begin, weight, own.count(), sum + own.begin);
  }
}

}  // namespace penstock
