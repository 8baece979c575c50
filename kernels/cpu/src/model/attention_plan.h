// How the threads share the attention of a step.
#pragma once
#include <vector>

#include "model/plan.h"
#include "model/spec.h"

namespace penstock {

// Query rows of one sequence that attend together: [first_row, first_row + rows). A row is token * group + query
// head.
struct QueryTile {
  int seq, first_row, rows, context;
};

struct AttentionPlan {
  std::vector<QueryTile> tiles;
  std::vector<int> span_starts;    // index of each tile's first span among all spans, then the number of spans
  std::vector<int> store_runs;     // first token of each run that one thread must store (kTokensPerWord), then the end
  bool splits_spans = false;       // whether threads share the spans of a tile
  bool stores_with_tiles = false;  // whether a token's key and value are stored right before its own tile attends

  void set(const Spec& spec, const Plan& plan, int num_threads);

 private:
  void add_sequence(const Spec& spec, const Plan& plan, int seq);
};

}  // namespace penstock
