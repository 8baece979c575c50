#include "gemm/hadamard.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace penstock {
namespace {

// Vectors that the first pass combines in registers.
constexpr int kFirst = kRegisters >= 32 ? 8 : 2;

Floats butterflies(Floats x, int run) {
  if (run >= 2) x = butterfly<1>(x);
  if (run >= 4) x = butterfly<2>(x);
  if (run >= 8) x = butterfly<4>(x);
  if (run >= 16) x = butterfly<8>(x);
  return x;
}

// The stages of the fast Hadamard transform that combine N vectors, each `apart` numbers from the next.
template <int N>
PENSTOCK_INLINE void combine(Floats (&x)[N]) {
  for (int step = 1; step < N; step *= 2) {
    for (int i = 0; i < N; ++i) {
      if (i & step) continue;
      const Floats a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
}

template <int N>
void combine_all(float* row, int count, int apart) {
  for (int begin = 0; begin < count; begin += N * apart) {
    for (float* at = row + begin; at < row + begin + apart; at += kLanes) {
      Floats x[N];
      for (int i = 0; i < N; ++i) x[i] = load(at + i * apart);
      combine(x);
      for (int i = 0; i < N; ++i) store(at + i * apart, x[i]);
    }
  }
}

template <class Number>
struct Lane;
template <>
struct Lane<float> {
  static float read(const float* x) { return *x; }
  static void write(float* x, float value) { *x = value; }
  static float spread(float x) { return x; }
};
template <>
struct Lane<Floats> {
  static Floats read(const float* x) { return load(x); }
  static void write(float* x, Floats value) { store(x, value); }
  static Floats spread(float x) { return broadcast(x); }
};

}  // namespace

HadamardRotation::HadamardRotation(int count)
    : count_(count), run_(count & -count), num_runs_(count / run_), mix_(num_runs_ * num_runs_), unmix_(mix_.size()) {
  const double pi = std::acos(-1.0);
  for (int i = 0; i < num_runs_; ++i) {
    const double length = std::sqrt((i == 0 ? 1.0 : 2.0) / count_);
    for (int j = 0; j < num_runs_; ++j) {
      mix_[i * num_runs_ + j] = unmix_[j * num_runs_ + i] = length * std::cos(pi * i * (j + 0.5) / num_runs_);
    }
  }
}

void HadamardRotation::apply(const float* row, float* out) const {
  transform_runs(row, out);
  mix_runs(out, mix_);
}

void HadamardRotation::invert(float* row) const {
  mix_runs(row, unmix_);
  transform_runs(row, row);
}

void HadamardRotation::transform_runs(const float* row, float* out) const {
  int apart = kLanes;
  if (run_ % (kFirst * kLanes) == 0) {
    for (int begin = 0; begin < count_; begin += kFirst * kLanes) {
      Floats x[kFirst];
      for (int i = 0; i < kFirst; ++i) x[i] = butterflies(load(row + begin + i * kLanes), kLanes);
      combine(x);
      for (int i = 0; i < kFirst; ++i) store(out + begin + i * kLanes, x[i]);
    }
    apart *= kFirst;
  } else {
    for (int i = 0; i < count_; i += kLanes) store(out + i, butterflies(load(row + i), run_));
  }
  for (; 2 * apart < run_; apart *= 4) combine_all<4>(out, count_, apart);
  if (apart < run_) combine_all<2>(out, count_, apart);
}

void HadamardRotation::mix_runs(float* row, const std::vector<float>& matrix) const {
  if (num_runs_ == 1 && run_ % kLanes == 0) {
    for (int i = 0; i < run_; i += kLanes) store(row + i, load(row + i) * broadcast(matrix[0]));
  } else if (run_ % (4 * kLanes) == 0) {
    mix_runs_by<Floats, 4>(row, matrix.data());
  } else if (run_ % kLanes == 0) {
    mix_runs_by<Floats, 1>(row, matrix.data());
  } else {
    mix_runs_by<float, 1>(row, matrix.data());
  }
}

// Applies the cosine transform, or its inverse, to N numbers, or N vectors, of each run at a time.
template <class Number, int N>
void HadamardRotation::mix_runs_by(float* row, const float* matrix) const {
  constexpr int kWidth = sizeof(Number) / sizeof(float);
  thread_local std::vector<std::array<Number, N>> of_runs;
  of_runs.resize(num_runs_);
  std::array<Number, N>* const before = of_runs.data();
  for (float* x = row; x < row + run_; x += N * kWidth) {
    for (int j = 0; j < num_runs_; ++j)
      for (int k = 0; k < N; ++k) before[j][k] = Lane<Number>::read(x + j * run_ + k * kWidth);
    const float* mix = matrix;
    for (int i = 0; i < num_runs_; ++i, mix += num_runs_) {
      Number sum[N];
      for (int k = 0; k < N; ++k) sum[k] = before[0][k] * Lane<Number>::spread(mix[0]);
      for (int j = 1; j < num_runs_; ++j) {
        const Number factor = Lane<Number>::spread(mix[j]);
        for (int k = 0; k < N; ++k) sum[k] = sum[k] + before[j][k] * factor;
      }
      for (int k = 0; k < N; ++k) Lane<Number>::write(x + i * run_ + k * kWidth, sum[k]);
    }
  }
}

}  // namespace penstock
