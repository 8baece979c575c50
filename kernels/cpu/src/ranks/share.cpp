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

Share::Share(const Spec& spec, const LayerSpec* layers) {
  const Span panels = part_of(spec, panels_for(spec.hidden));
  hidden_ = {panels.begin * kPanel, panels.end * kPanel};
  head_.add(part_of(spec, panels_for(spec.vocab)));
  for (int i = 0; i < spec.num_layers; ++i) layers_.push_back(share_of(spec, layers[i]));
}

Share::LayerShare Share::share_of(const Spec& spec, const LayerSpec& layer) {
  LayerShare share;
  const auto panels_of = [&share](Slot slot) -> PanelSet& { return share.panels[(int)slot]; };
  if (layer.has_mlp()) {
    panels_of(Slot::kMlpIn).add(part_of(spec, layer.inner_panels(layer.intermediate)));
    panels_of(Slot::kMlpOut).add(part_of(spec, panels_for(spec.hidden)));
  }
  if (layer.has_mixture()) {
    panels_of(Slot::kExpertIn).add(part_of(spec, layer.inner_panels(layer.expert_intermediate)));
    panels_of(Slot::kExpertOut).add(part_of(spec, panels_for(spec.hidden)));
  }
  if (layer.recurs()) {
    // A model with recurrent layers has one rank.
    panels_of(Slot::kQkv).add(part_of(spec, panels_for(layer.projected())));
    panels_of(layer.attends() ? Slot::kMixerOut : Slot::kOut).add(part_of(spec, panels_for(spec.hidden)));
  }
  if (spec.token_size > 0) {
    panels_of(Slot::kTokenGate).add(part_of(spec, panels_for(spec.token_size)));
    panels_of(Slot::kTokenOut).add(part_of(spec, panels_for(spec.hidden)));
  }
  if (!layer.attends()) return share;
  panels_of(Slot::kOut).add(part_of(spec, panels_for(spec.hidden)));
  const Span heads = share.kv_heads = part_of(spec, layer.num_kv_heads);
  const int keys = layer.keys(), queries = layer.query_rows();
  if (layer.joins_head_norms) {
    // The norms need all heads, so the ranks exchange queries and keys, and no rank needs those of its heads.
    panels_of(Slot::kQkv).add(part_of(spec, panels_for(queries + 2 * keys)));
    return share;
  }
  const int dim = layer.head_dim, group_rows = layer.group() * layer.query_stride();
  panels_of(Slot::kQkv).add(panels_with(heads.begin * group_rows, heads.end * group_rows));
  if (!layer.has_keys()) return share;
  for (const int first : {queries, queries + keys}) {
    panels_of(Slot::kQkv).add(panels_with(first + heads.begin * dim, first + heads.end * dim));
  }
  return share;
}

}  // namespace penstock
