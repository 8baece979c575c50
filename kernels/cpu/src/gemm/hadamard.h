// Orthogonal matrices that spread over all channels what a few outliers carry, so that one scale for a row of integers
// does it justice (QuaRot, arXiv:2404.00456). What reads a turned row has its own columns turned: their product is the same.
#pragma once
#include <vector>

#include "simd/simd.h"

namespace penstock {

// Of rows of `count` = 2^k * m numbers: a Hadamard matrix over runs of 2^k, and a cosine transform over the m runs.
class Turn {
 public:
  explicit Turn(int count);

  // `out` may be `row`. Behind both there is room up to a multiple of 16, with zeros that stay.
  void apply(const float* row, float* out) const;

 private:
  template <class Number, int N>
  void mix_runs(float* row) const;

  int count_, run_, num_runs_;
  std::vector<float> mix_;  // [num_runs, num_runs], divided by the square root of run_
};

}  // namespace penstock
