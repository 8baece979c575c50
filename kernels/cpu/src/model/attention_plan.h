// How the threads share the attention of a step.
#pragma once
#include <vector>

#include "model/plan.h"

namespace penstock {

// Query rows of one sequence that attend together: [first_row, first_row + rows). A row is token * group + query
// head. `context`: end of the tokens that the last row sees.
struct QueryTile {
  int seq, first_row, rows, context;
};

struct AttentionPlan {
  std::vector<QueryTile> tiles;
  // The index of each tile's first span among all spans, then the number of spans.
  std::vector<int> span_starts;
  // The first token of each run that one thread must store (kTokensPerWord), then the number of tokens.
  std::vector<int> store_runs;
  // Whether threads share the spans of a tile.
  bool splits_spans = false;
  // Whether a token's key and value are stored right before its own tile attends.
  bool stores_with_tiles = false;

  // `num_heads`: key/value heads that attend. `group`: query heads of each. `sees_all`: whether each token sees all of
  // its sequence, which has no earlier tokens.
  void set(int num_heads, int group, int block_size, const Plan& plan, int num_threads, bool sees_all);

 private:
  void add_sequence(int group, const Plan& plan, int seq, bool sees_all);
};

}  // namespace penstock
