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

// The stage of the fast Hadamard transform that combines numbers `apart` from each other.
void combine(float* row, int count, int apart) {
  for (int begin = 0; begin < count; begin += 2 * apart) {
    for (float* x = row + begin; x < row + begin + apart; x += kLanes) {
      const Floats a = load(x), b = load(x + apart);
      store(x, a + b);
      store(x + apart, a - b);
    }
  }
}

// That stage and the next in one pass.
void combine_twice(float* row, int count, int apart) {
  for (int begin = 0; begin < count; begin += 4 * apart) {
    for (float* x = row + begin; x < row + begin + apart; x += kLanes) {
      const Floats a = load(x), b = load(x + apart), c = load(x + 2 * apart), d = load(x + 3 * apart);
      const Floats ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
      store(x, ab + cd);
      store(x + apart, a_b + c_d);
      store(x + 2 * apart, ab - cd);
      store(x + 3 * apart, a_b - c_d);
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

Turn::Turn(int count) : count_(count), run_(count & -count), num_runs_(count / run_), mix_(num_runs_ * num_runs_) {
  const double pi = std::acos(-1.0);
  for (int i = 0; i < num_runs_; ++i) {
    const double length = std::sqrt((i == 0 ? 1.0 : 2.0) / count_);
    for (int j = 0; j < num_runs_; ++j) mix_[i * num_runs_ + j] = length * std::cos(pi * i * (j + 0.5) / num_runs_);
  }
}

void Turn::apply(float* row) const {
  for (int i = 0; i < count_; i += kLanes) store(row + i, butterflies(load(row + i), run_));
  int apart = kLanes;
  for (; 2 * apart < run_; apart *= 4) combine_twice(row, count_, apart);
  if (apart < run_) combine(row, count_, apart);
  if (run_ % kLanes == 0) {
    mix_runs<Floats>(row);
  } else {
    mix_runs<float>(row);
  }
}

// A number, or a vector of them, of each run at a time.
template <class Number>
void Turn::mix_runs(float* row) const {
  thread_local std::vector<Number> of_runs;
  of_runs.resize(num_runs_);
  Number* const before = of_runs.data();
  for (float* x = row; x < row + run_; x += sizeof(Number) / sizeof(float)) {
    for (int j = 0; j < num_runs_; ++j) before[j] = Lane<Number>::read(x + j * run_);
    const float* mix = mix_.data();
    for (int i = 0; i < num_runs_; ++i, mix += num_runs_) {
      Number sum = before[0] * Lane<Number>::spread(mix[0]);
      for (int j = 1; j < num_runs_; ++j) sum = sum + before[j] * Lane<Number>::spread(mix[j]);
      Lane<Number>::write(x + i * run_, sum);
    }
  }
}

}  // namespace penstock
