#include "model/step.h"

#include <algorithm>
#include <iterator>
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
  if (plan.num_pooled == 0) return;
  std::vector<char> is_listed(plan.num_tokens, 0);
  for (const int token : head_tokens) is_listed[token] = 1;
  std::copy_if(plan.pooled_tokens, plan.pooled_tokens + plan.num_pooled, std::back_inserter(head_tokens),
               [&](int token) { return !is_listed[token]; });
}

}  // namespace penstock
