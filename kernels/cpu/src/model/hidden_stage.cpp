#include "model/hidden_stage.h"

namespace penstock {

void HiddenStage::run(Worker& worker) const {
  const Plan& plan = step_.plan;
  if (plan.num_pooled == 0) return;
  worker.for_each(plan.num_pooled, [&](int i) {
    const NormedRow normed = weights_.final_norm.apply(buffers_.hidden.row(plan.pooled_tokens[i]));
    weights_.write_final(normed.values, plan.hidden + (size_t)i * hidden_);
  });
}

}  // namespace penstock
