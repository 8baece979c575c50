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
  explicit Share(const Spec& spec);

  // The panels of a layer's matrix that this rank multiplies with. With experts: of each expert.
  const PanelSet& panels(Slot slot) const { return panels_[(int)slot]; }
  const PanelSet& head_panels() const { return panels_[(int)Slot::kHead]; }
  Span kv_heads() const { return kv_heads_; }
  // The numbers of a hidden state that this rank computes, padding included.
  Span hidden() const;
  // Whether this rank embeds a token: each one is embedded by the rank that has its logit.
  bool embeds(int token) const { return head_panels().hull().has(token / kPanel); }

 private:
  Span kv_heads_;
  std::array<PanelSet, (int)Slot::kHead + 1> panels_;
};

}  // namespace penstock
