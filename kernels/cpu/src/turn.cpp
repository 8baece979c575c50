#include "turn.h"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

Floats butterflies(Floats x, int run) {
  if (run >= 2) x = butterfly<1>(x);
  if (run >= 4) x = butterfly<2>(x);
  if (run >= 8) x = butterfly<4>(x);
  if (run >= 16) x = butterfly<8>(x);
  return x;
}

// The stage of the fast Hadamard transform that combines numbers `apart` vectors from each other.
void combine(float* row, int count, int apart) {
  for (int begin = 0; begin < count; begin += 2 * apart) {
    float *low = row + begin, *high = low + apart;
    for (int i = 0; i < apart; i += kLanes) {
      const Floats a = load(low + i), b = load(high + i);
      store(low + i, a + b);
      store(high + i, a - b);
    }
  }
}

}  // namespace

Turn::Turn(int count) : count_(count), run_(count & -count), num_runs_(count / run_), mix_(num_runs_ * num_runs_) {
  const double pi = std::acos(-1.0);
  for (int i = 0; i < num_runs_; ++i) {
    const double length = std::sqrt((i == 0 ? 1.0 : 2.0) / count_);
    for (int j = 0; j < num_runs_; ++j) mix_[i * num_runs_ + j] = length * std::cos(pi * i * (j + 0.5) / num_runs_);
  }
}

void Turn::apply(float* row) const {
  for (int i = 0; i < count_; i += kLanes) store(row + i, butterflies(load(row + i), run_));
  for (int apart = kLanes; apart < run_; apart *= 2) combine(row, count_, apart);
  mix_runs(row);
}

void Turn::mix_runs(float* row) const {
  thread_local std::vector<float> before;
  before.assign(row, row + count_);
  for (int i = 0; i < num_runs_; ++i) {
    float* out = row + i * run_;
    const float* mix = mix_.data() + i * num_runs_;
    for (int k = 0; k < run_; ++k) out[k] = mix[0] * before[k];
    for (int j = 1; j < num_runs_; ++j) {
      for (int k = 0; k < run_; ++k) out[k] += mix[j] * before[j * run_ + k];
    }
  }
}

}  // namespace penstock
