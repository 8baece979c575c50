// What a LoRA adapter adds to a matrix's products (arXiv:2106.09685). A row shrinks to a few inner numbers, which
// expand to the outputs. Every number is one chain of sums over its own row, so its bits do not depend on the batch.
#pragma once
#include <vector>

#include "gemm/fill.h"
#include "threads/memory.h"
#include "weights/weights.h"

namespace penstock {

// An adapter's matrices for some rows of a weight matrix, as Python passes them. down: [rank][columns]; up:
// [count][rank].
struct LowRankPart {
  int32_t layout, first, count, rank;
  const float *down, *up;
};

class LowRank {
 public:
  LowRank() = default;
  // rows, columns, transform: of the matrix to whose products it adds.
  LowRank(const LowRankPart* parts, int num_parts, int rows, int columns, const WeightTransform& transform);

  int rank() const { return rank_; }
  // x: the matrix's input, zero-padded to a multiple of 16. inner: [rank].
  void shrink(const float* x, float* inner) const;
  // Adds the adapter's part to the outputs of a panel.
  void expand(const float* inner, int panel, float* out) const;

 private:
  // The inner numbers on which 16 outputs depend, and the index of their first weight.
  struct Run {
    int first, end;
    size_t at;
  };

  void set_down(int first, const LowRankPart& part, int columns, const WeightTransform& transform);
  void set_up(const std::vector<float>& dense, int rows);

  int rank_ = 0;
  int columns_ = 0;    // padded to 16
  Buffer<bf16> down_;  // [rank][columns]
  std::vector<Run> runs_;
  std::vector<bf16> up_;  // of each run: [end - first][16]
};

}  // namespace penstock
