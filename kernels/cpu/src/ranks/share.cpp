#include "ranks/share.h"

#include <algorithm>

namespace penstock {
namespace {

int panels_for(int rows) { return (rows + kPanel - 1) / kPanel; }

// The part of `count` things that belongs to a rank.
Span part_of(const Spec& spec, int count) {
  const int64_t rank = spec.rank, size = spec.group_size();
  return {(int)(count * rank / size), (int)(count * (rank + 1) / size)};
}

Span panels_with(int first_row, int end_row) { return {first_row / kPanel, panels_for(end_row)}; }

}  // namespace

void PanelSet::add(Span panels) {
  if (!spans_.empty()) panels.begin = std::max(panels.begin, spans_.back().end);
  if (panels.count() <= 0) return;
  spans_.push_back(panels);
  count_ += panels.count();
}

Share::Share(const Spec& spec) : kv_heads_(part_of(spec, spec.num_kv_heads)) {
  const auto panels_of = [this](Slot slot) -> PanelSet& { return panels_[(int)slot]; };
  panels_of(Slot::kOut).add(part_of(spec, panels_for(spec.hidden)));
  panels_of(Slot::kMlpIn).add(part_of(spec, spec.inner_panels()));
  panels_of(Slot::kMlpOut).add(part_of(spec, panels_for(spec.hidden)));
  panels_of(Slot::kHead).add(part_of(spec, panels_for(spec.vocab)));
  panels_of(Slot::kEmbedding) = head_panels();
  const int keys = spec.num_kv_heads * spec.head_dim, queries = spec.queries();
  if (spec.joins_head_norms) {
    // The norms need all heads, so the ranks exchange queries and keys, and no rank needs those of its heads.
    panels_of(Slot::kQkv).add(part_of(spec, panels_for(queries + 2 * keys)));
    return;
  }
  const int dim = spec.head_dim, group = spec.group();
  panels_of(Slot::kQkv).add(panels_with(kv_heads_.begin * group * dim, kv_heads_.end * group * dim));
  for (const int first : {queries, queries + keys}) {
    panels_of(Slot::kQkv).add(panels_with(first + kv_heads_.begin * dim, first + kv_heads_.end * dim));
  }
}

Span Share::hidden() const {
  const Span panels = panels_[(int)Slot::kOut].hull();
  return {panels.begin * kPanel, panels.end * kPanel};
}

}  // namespace penstock
