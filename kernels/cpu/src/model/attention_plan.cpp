#include "model/attention_plan.h"

#include <algorithm>

#include "attention/attention.h"

namespace penstock {
namespace {

// With fewer attention tiles per thread than this, long contexts are cut into spans that threads share.
constexpr int kTilesPerThread = 4;

bool fills_block(const Plan& plan, int block_size) {
  return std::any_of(plan.positions, plan.positions + plan.num_tokens,
                     [&](int position) { return (position + 1) % block_size == 0; });
}

}  // namespace

void AttentionPlan::set(int num_heads, int group, int block_size, const Plan& plan, int num_threads, bool sees_all) {
  tiles.clear();
  span_starts.assign(1, 0);
  store_runs.clear();
  for (int s = 0; s < plan.num_seqs; ++s) add_sequence(group, plan, s, sees_all);
  store_runs.push_back(plan.num_tokens);
  const bool has_long = std::any_of(tiles.begin(), tiles.end(), [](auto& tile) { return tile.context > kSpan; });
  splits_spans = has_long && (int)tiles.size() * num_heads < kTilesPerThread * num_threads;
  // Another sequence of this step may read only blocks that this step fills. If it fills none, no tile needs the
  // tokens of another one.
  const bool has_a_tile_per_token = plan.num_tokens == plan.num_seqs && (int)tiles.size() == plan.num_seqs;
  stores_with_tiles = has_a_tile_per_token && !splits_spans && !fills_block(plan, block_size);
}

void AttentionPlan::add_sequence(int group, const Plan& plan, int seq, bool sees_all) {
  const int begin = plan.query_starts[seq], end = plan.query_starts[seq + 1];
  for (int token = begin; token < end; ++token) {
    const bool continues = token > begin && plan.positions[token] % kTokensPerWord != 0;
    if (!continues) store_runs.push_back(token);
  }
  const int rows = (end - begin) * group;
  const int count = (rows + kMaxQueryRows - 1) / kMaxQueryRows;
  for (int t = 0; t < count; ++t) {
    const int first_row = (int64_t)rows * t / count, end_row = (int64_t)rows * (t + 1) / count;
    const int context = plan.positions[sees_all ? end - 1 : begin + (end_row - 1) / group] + 1;
    tiles.push_back({seq, first_row, end_row - first_row, context});
    span_starts.push_back(span_starts.back() + num_spans(context));
  }
}

}  // namespace penstock
