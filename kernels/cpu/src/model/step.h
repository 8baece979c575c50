// The step that runs: its plan, and what follows from the plan for every stage.
#pragma once
#include <cstddef>
#include <vector>

#include "model/plan.h"

namespace penstock {

struct Step {
  Plan plan{};
  std::vector<int> seq_of_token;
  std::vector<int> all_tokens;
  // Tokens that the last layer computes: those that are sampled, then those that are only scored, then those of which
  // only the hidden state is wanted. Each is listed once.
  std::vector<int> head_tokens;
  int num_chosen = 0;  // head tokens that are sampled or return their logits

  void begin(const Plan& next);
  // The adapter slot of a token's sequence; -1 if it has none.
  int adapter_slot(int token) const { return plan.adapters ? plan.adapters[seq_of_token[token]] : -1; }
  // The block table of a sequence: that of its window, or that of its whole text.
  const int32_t* block_table(int seq, bool of_window) const {
    return (of_window ? plan.window_tables : plan.block_tables) + (size_t)seq * plan.block_table_stride;
  }
};

}  // namespace penstock
