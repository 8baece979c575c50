// Norms of a row, in single precision.
#pragma once
#include <cmath>

#include "simd/simd.h"

namespace penstock {

// RMS norm; `out` may be the row itself. Rows and weights have `padded` numbers, of which those after the first `count` are zero. Returns whether
// the row is finite.
inline bool rms_norm(const float* x, const float* weight, int padded, int count, float eps, float* out) {
  Floats squares = zeros();
  for (int i = 0; i < padded; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const float total = sum(squares);
  const Floats inverse = broadcast(1.f / std::sqrt(total / count + eps));
  for (int i = 0; i < padded; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
  return std::isfinite(total);
}

// RMS norm without weights. count: a multiple of kLanes.
inline void unit_norm(const float* x, int count, float eps, float* out) {
  Floats squares = zeros();
  for (int i = 0; i < count; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const Floats inverse = broadcast(1.f / std::sqrt(sum(squares) / count + eps));
  for (int i = 0; i < count; i += kLanes) store(out + i, load(x + i) * inverse);
}

// Layer norm, by mean and variance. Arguments and result as for rms_norm.
inline bool layer_norm(const float* x, const float* weight, const float* bias, int padded, int count, float eps,
                       float* out) {
  Floats sums = zeros(), squares = zeros();
  for (int i = 0; i < padded; i += kLanes) sums = sums + load(x + i);
  const Floats mean = broadcast(sum(sums) / count);
  for (int i = 0; i < padded; i += kLanes) {
    const Mask is_there = less(lane_numbers() + broadcast_int(i), broadcast_int(count));
    const Floats distance = select(is_there, load(x + i) - mean, zeros());
    squares = fma(distance, distance, squares);
  }
  const float total = sum(squares);
  const Floats inverse = broadcast(1.f / std::sqrt(total / count + eps));
  for (int i = 0; i < padded; i += kLanes) {
    store(out + i, fma((load(x + i) - mean) * inverse, load(weight + i), load(bias + i)));
  }
  return std::isfinite(total);
}

}  // namespace penstock
