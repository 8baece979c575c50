// The MLP of a layer with a mixture of experts. A router chooses a few experts for each row, and adds their outputs by
// weight.
//
// Each chosen expert of a row is an entry. The entries are sorted by expert, so that the panels of an expert's matrices
// are read once for all of its rows. An output depends only on its own row, as in `multiply`, and a row adds its
// outputs in the order of its choices. Its bits therefore do not depend on the batch.
//
// A mixture beside the layer's MLP is computed before that. Its normed outputs are kept, and the MLP adds both.
#pragma once
#include <vector>

#include "gemm/gemm.h"
#include "model/step_buffers.h"
#include "ranks/group.h"
#include "ranks/share.h"
#include "weights/decoder_weights.h"
#include "weights/spec.h"

namespace penstock {

class ExpertStage {
 public:
  ExpertStage(const Spec& spec, const LayerSpec* layers, const Share& share, RankGroup& group,
              const StepBuffers& buffers)
      : spec_(spec),
        share_(share),
        group_(group),
        buffers_(buffers),
        most_per_token_(largest_of_layers(spec, layers, [](const LayerSpec& one) { return one.entries_per_token(); })),
        normed_(spec.hidden),
        gated_(largest_of_layers(spec, layers,
                                 [](const LayerSpec& one) { return one.num_experts > 0 ? one.expert_size() : 0; })),
        outputs_(spec.hidden),
        sums_(spec.hidden) {}

  // Places the rows that the ranks share, for `rows` rows of a layer: none if no layer has experts.
  void place(Arena& arena, int rows) {
    if (most_per_token_ > 0) gated_.place(arena, rows * most_per_token_);
  }

  // Reserves memory for `rows` rows of a layer.
  void prepare(const Layer& layer, int rows);
  // Adds the output of the MLP to the hidden state, or keeps that of a mixture beside it. `tokens`: the token of each row.
  void run(Worker& worker, const Layer& layer, const std::vector<int>& tokens);
  // The outputs that were kept, by row.
  const RowBuffer& kept() const { return sums_; }

 private:
  struct Choice {
    int expert;
    float weight;
  };
  // An expert with entries, and the tiles of these.
  struct Group {
    int expert, begin, end;
  };
  // The entries as the input of one of the experts' matrices.
  struct Input {
    Activations rows;
    std::vector<Group> groups;
  };

  // Chooses the experts of a row, best first.
  void route(const Layer& layer, const float* hidden, int row);
  float score(const float* weights, const float* input) const;
  // Sorts the entries by expert.
  void sort(const Layer& layer, int rows);
  // Cuts an input into tiles by expert. The entries must be sorted.
  void cut(Input& input, const Matrix& matrix) const;
  // Multiplies each expert's entries with this rank's panels of its matrix. `finish`: as for `multiply`, with the
  // panels of each expert counted from 0.
  template <class Finish>
  void multiply_groups(Worker& worker, const Input& input, const Layer& layer, Slot slot, const Finish& finish) const;
  void add_outputs(const Layer& layer, int row, float scale, float* sum) const;
  void keep_outputs(const Layer& layer, int row) const;

  const Spec& spec_;
  const Share& share_;
  RankGroup& group_;
  const StepBuffers& buffers_;
  const int most_per_token_;  // experts of a token, in any layer
  Input input_, gated_input_;
  RowBuffer normed_;             // by row
  RowBuffer gated_, outputs_;    // by entry
  RowBuffer sums_;               // by row: the normed outputs of a mixture beside the MLP
  std::vector<Choice> choices_;  // [rows][entries of a token]: the chosen experts, then those that every token has.
  std::vector<int> rows_;        // by entry: its row.
  std::vector<int> entries_;     // by choice: its entry.
  std::vector<int> ends_;        // by expert: the end of its entries
};

}  // namespace penstock
