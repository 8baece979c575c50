// What an adapter adds to a matrix's products (LoRA, arXiv:2106.09685): a row shrinks to a few numbers, which expand to
// the outputs. Every number is one chain of sums over its own row: its bits do not depend on the batch.
#pragma once
#include <vector>

#include "gemm/fill.h"
#include "threads/memory.h"
#include "model/weights.h"

namespace penstock {

// Of some rows of a matrix, as Python hands it over. down: [rank][columns]; up: [count][rank].
struct LowRankPart {
  int32_t place, first, count, rank;
  const float *down, *up;
};

class LowRank {
 public:
  LowRank() = default;
  // `matrix` and `change` are those that it goes beside.
  LowRank(const LowRankPart* parts, int num_parts, const Matrix& matrix, const Change& change);

  int rank() const { return rank_; }
  // x: the matrix's columns, zeros up to a multiple of 16. inner: [rank].
  void shrink(const float* x, float* inner) const;
  // Adds to the outputs of a panel.
  void expand(const float* inner, int panel, float* out) const;

 private:
  // Which of the inner numbers reach 16 outputs, and where their weights lie.
  struct Run {
    int first, end;
    size_t at;
  };

  void set_down(int first, const LowRankPart& part, int columns, const Change& change);
  void set_up(const std::vector<float>& dense, int rows);

  int rank_ = 0;
  int columns_ = 0;    // padded to 16
  Buffer<bf16> down_;  // [rank][columns]
  std::vector<Run> runs_;
  std::vector<bf16> up_;  // of each run: [end - first][16]
};

}  // namespace penstock
