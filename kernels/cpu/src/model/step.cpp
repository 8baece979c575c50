#include "model/step.h"

#include <algorithm>
#include <numeric>

namespace penstock {

void Step::begin(const Plan& next) {
  plan = next;
  all_tokens.resize(plan.num_tokens);
  std::iota(all_tokens.begin(), all_tokens.end(), 0);
  seq_of_token.resize(plan.num_tokens);
  for (int s = 0; s < plan.num_seqs; ++s) {
    std::fill(seq_of_token.begin() + plan.query_starts[s], seq_of_token.begin() + plan.query_starts[s + 1], s);
  }
  if (plan.logits) {
    head_tokens = all_tokens;
  } else {
    head_tokens.assign(plan.sample_tokens, plan.sample_tokens + plan.num_samples);
  }
  num_chosen = (int)head_tokens.size();
  head_tokens.insert(head_tokens.end(), plan.scored_tokens, plan.scored_tokens + plan.num_scored);
}

}  // namespace penstock
