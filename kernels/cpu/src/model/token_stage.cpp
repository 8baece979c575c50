#include "model/token_stage.h"

#include <cmath>

#include "gemm/gemm.h"
#include "model/mlp_stage.h"
#include "weights/norm.h"

namespace penstock {

void TokenStage::prepare() {
  if (width_ == 0) return;
  hidden_.prepare(step_.plan.num_tokens, weights_.token_inputs);
  projected_.reserve(step_.plan.num_tokens);
}

void TokenStage::project(Worker& worker) {
  if (width_ == 0) return;
  const int count = step_.plan.num_tokens, size = spec_.token_size;
  worker.for_each(count, [&](int i) { hidden_.set_row(i, buffers_.hidden.row(i)); });
  const Matrix& matrix = weights_.token_inputs;
  multiply(worker, hidden_, matrix, AllPanels{matrix.num_panels()},
           [&](int first, int rows, int panel, const float* out) {
             for (int r = 0; r < rows; ++r) {
               float* row = projected_.row(first + r) + panel * kPanel;
               for (int j = 0; j < kPanel; j += kLanes) {
                 store(row + j, load(out + r * kPanel + j) * broadcast(spec_.token_projection_scale));
               }
             }
           });
  const Floats scale = broadcast(spec_.token_scale), half = broadcast(std::sqrt(0.5f));
  worker.for_each(count, [&](int i) {
    float *inputs = inputs_of(i), *projected = projected_.row(i);
    for (int at = 0; at < width_; at += size) {
      rms_norm(projected + at, weights_.token_input_norm.data(), size, size, spec_.norm_eps, projected + at);
    }
    for (int at = 0; at < width_; at += kLanes) {
      store(inputs + at, fma(load(inputs + at), scale, load(projected + at)) * half);
    }
  });
}

void TokenStage::add(Worker& worker, const Layer& layer, LayerProducts& products) const {
  const auto hidden = [&](int i) { return buffers_.hidden.row(products.tokens()[i]); };
  products.run(worker, layer, Slot::kTokenGate, hidden, [&](int first, int rows, int panel, const float* out) {
    for (int r = 0; r < rows; ++r) {
      const float* own = inputs_of(products.tokens()[first + r]) + layer.index * spec_.token_size + panel * kPanel;
      float* row = buffers_.gated.row(first + r) + panel * kPanel;
      for (int j = 0; j < kPanel; j += kLanes) {
        store(row + j, activated((Activation)layer.spec.token_activation, load(out + r * kPanel + j)) * load(own + j));
      }
    }
  });
  const auto gated = [&](int i) { return buffers_.gated.row(i); };
  products.add(worker, layer, Slot::kTokenOut, gated, layer.token_norm, layer.output_factor());
}

}  // namespace penstock
