// Orthogonal rotations of rows. They spread a few outliers over all channels, so that one scale suffices for a row of
// integers (QuaRot, arXiv:2404.00456). A matrix that reads rotated rows has its columns rotated too, which leaves the
// product unchanged.
#pragma once
#include <vector>

#include "simd/simd.h"

namespace penstock {

// A rotation of rows of `count` = 2^k * m numbers: a Hadamard matrix over runs of 2^k, and a cosine transform over
// the m runs.
class HadamardRotation {
 public:
  explicit HadamardRotation(int count);

  // Rotates a row. `out` may be `row`. Both have padding to a multiple of 16, which is zero and stays zero.
  void apply(const float* row, float* out) const;
  // Undoes `apply`, in place.
  void invert(float* row) const;

 private:
  // Applies the Hadamard matrix to each run. It is its own inverse, but for the factor run_.
  void transform_runs(const float* row, float* out) const;
  void mix_runs(float* row, const std::vector<float>& matrix) const;
  template <class Number, int N>
  void mix_runs_by(float* row, const float* matrix) const;

  int count_, run_, num_runs_;
  std::vector<float> mix_;    // [num_runs, num_runs], divided by the square root of run_
  std::vector<float> unmix_;  // its transpose
};

}  // namespace penstock
