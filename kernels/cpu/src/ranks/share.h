// The part of a model that one rank of a group computes: attention by key/value head, matrices by panels of outputs.
//
// An output is computed by one rank, from the same input as without a group. So its bits are the same.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "weights/decoder_weights.h"
#include "weights/spec.h"
#include "weights/weights.h"

namespace penstock {

// Numbers from `begin` to before `end`.
struct Span {
  int begin, end;

  int count() const { return end - begin; }
  bool has(int i) const { return begin <= i && i < end; }
};

// Panels of a matrix, ascending.
class PanelSet {
 public:
  // Adds panels behind the others. Those that are there already are left out.
  void add(Span panels);
  int count() const { return count_; }
  // The panel at index `i`.
  int at(int i) const {
    const Span* span = spans_.data();
    while (i >= span->count()) i -= (span++)->count();
    return span->begin + i;
  }
  // The first panel, and the end of the last one.
  Span hull() const { return spans_.empty() ? Span{0, 0} : Span{spans_.front().begin, spans_.back().end}; }

 private:
  std::vector<Span> spans_;
  int count_ = 0;
};

class Share {
 public:
  // layers: [spec.num_layers].
  Share(const Spec& spec, const LayerSpec* layers);

  // The panels of a layer's matrix that this rank multiplies with. With experts: of each expert.
  const PanelSet& panels(int layer, Slot slot) const { return layers_[layer].panels[(int)slot]; }
  const PanelSet& head_panels() const { return head_; }
  // The key/value heads of a layer that this rank computes.
  Span kv_heads(int layer) const { return layers_[layer].kv_heads; }
  // The numbers of a hidden state that this rank computes, padding included.
  Span hidden() const { return hidden_; }
  // Whether this rank embeds a token: each one is embedded by the rank that has its logit.
  bool embeds(int token) const { return head_.hull().has(token / kPanel); }

 private:
  struct LayerShare {
    Span kv_heads{0, 0};
    std::array<PanelSet, kLayerSlots> panels;
  };
  static LayerShare share_of(const Spec& spec, const LayerSpec& layer);

  std::vector<LayerShare> layers_;
  PanelSet head_;
  Span hidden_;
};

}  // namespace penstock
