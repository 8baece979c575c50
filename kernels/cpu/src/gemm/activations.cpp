#include "gemm/activations.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace penstock {

namespace {

// Quantizes a row; see quantize_row. `write(i, q)` stores the values from i on, sixteen at a time.
template <class Write>
PENSTOCK_INLINE float quantize(const float* values, int count, int32_t* total, const Write& write) {
  // Compared as integers, the magnitudes keep their order, with infinity above all numbers and NaN above infinity.
  constexpr int32_t kInfinity = 0x7f800000;
  Ints most = broadcast_int(0);
  for (int i = 0; i < count; i += kLanes) most = max(most, magnitude(load(values + i)));
  const int32_t largest_bits = largest(most);
  const bool is_finite = largest_bits < kInfinity;
  const float largest_value = std::bit_cast<float>(largest_bits), steps = 127.f / largest_value;
  // A factor of 0 makes all integers 0: for a row so small that the division overflows, and for a non-finite row.
  const Floats inverse = broadcast(is_finite && std::isfinite(steps) ? steps : 0.f);
  Ints sums = broadcast_int(0);
  for (int i = 0; i < count; i += kLanes) {
    const Ints rounded = to_ints(load(values + i) * inverse);
    sums = sums + rounded;
    write(i, rounded);
  }
  // Non-finite values have no integers; the NaN scale alone makes their products NaN.
  *total = is_finite ? sum(sums) : 0;
  return is_finite ? largest_value / 127.f : std::numeric_limits<float>::quiet_NaN();
}

// Quantizes each of `groups` groups of 32 in the same way, but one non-finite value makes all scales NaN.
// `half_sums`: null, or the sums of the halves of each group, [2 * groups].
template <class Write>
PENSTOCK_INLINE void quantize_groups(const float* values, int groups, float* scales, int32_t* sums, int32_t* half_sums,
                                     const Write& write) {
  constexpr int kBatch = kLanes;
  const Floats infinity = broadcast(std::numeric_limits<float>::infinity());
  Floats poison = zeros();
  // Sixteen groups at a time, so that the sums over their lanes are computed together.
  for (int first = 0; first < groups; first += kBatch) {
    const int count = std::min(kBatch, groups - first);
    const float* x = values + first * kGroup;
    Floats most[kBatch];
    for (int g = 0; g < kBatch; ++g) {
      most[g] = zeros();
      if (g >= count) continue;
      const Floats a = load(x + g * kGroup), b = load(x + g * kGroup + kLanes);
      most[g] = max(abs(a), abs(b));
      poison = fma(b, zeros(), fma(a, zeros(), poison));
    }
    const Floats largest_values = largest_of_each(most), steps = broadcast(127.f) / largest_values;
    alignas(64) float inverse[kBatch], scale[kBatch];
    store(inverse, select(greater(infinity, steps), steps, zeros()));
    store(scale, largest_values / broadcast(127.f));
    Ints totals[kBatch], firsts[kBatch];
    for (int g = 0; g < kBatch; ++g) {
      totals[g] = firsts[g] = broadcast_int(0);
      if (g >= count) continue;
      for (int i = g * kGroup; i < (g + 1) * kGroup; i += kLanes) {
        const Ints rounded = to_ints(max(load(x + i) * broadcast(inverse[g]), broadcast(-127.f)));
        firsts[g] = totals[g];
        totals[g] = totals[g] + rounded;
        write(first * kGroup + i, rounded);
      }
    }
    alignas(64) int32_t total[kBatch];
    store_ints(total, sum_of_each(totals));
    std::copy_n(scale, count, scales + first);
    std::copy_n(total, count, sums + first);
    if (half_sums) {
      alignas(64) int32_t first_half[kBatch];
      store_ints(first_half, sum_of_each(firsts));
      for (int g = 0; g < count; ++g) {
        half_sums[2 * (first + g)] = first_half[g];
        half_sums[2 * (first + g) + 1] = total[g] - first_half[g];
      }
    }
  }
  const float not_finite = sum(poison);
  if (not_finite != 0) std::fill_n(scales, groups, not_finite);
}

}  // namespace

float quantize_row(const float* values, int count, int8_t* q, int32_t* total) {
  return quantize(values, count, total, [&](int i, Ints x) { store_s8(q + i, x); });
}

void Activations::prepare(int rows, const Matrix& right) {
  encoding_ = right.encoding();
  // The matrices of other layers share this memory, and each may have other formats.
  has_halves_ |= right.has(Format::kQ2_K) || right.has(Format::kQ3_K) || right.has(Format::kQ6_K);
  tiling_.cut(std::max(rows, 1), encoding_);
  padded_ = right.padded_columns();
  words_ = padded_ / kGroup * run_words(encoding_);
  groups_ = encoding_ == Encoding::kByGroup ? padded_ / kGroup : 1;
  data_.reserve((size_t)rows * words_);
  scales_.reserve((size_t)rows * groups_);
  biases_.reserve((size_t)rows * groups_);
  offsets_.reserve((size_t)rows * groups_);
  if (!has_halves_) return;
  half_biases_.reserve((size_t)rows * groups_ * 2);
  half_offsets_.reserve((size_t)rows * groups_ * 2);
}

void Activations::set_row(int row, const float* values) {
  const int tile = tiling_.tile_of(row), first = tiling_.first(tile), stride = tiling_.size(tile), at = row - first;
  const int run = run_words(encoding_);
  uint32_t* out = data_.data() + (size_t)first * words_ + at * run;
  if (encoding_ == Encoding::kBf16) {
    for (int i = 0; i < padded_; i += kGroup, out += stride * run) {
      store_bf16(reinterpret_cast<bf16*>(out), load(values + i));
      store_bf16(reinterpret_cast<bf16*>(out) + kLanes, load(values + i + kLanes));
    }
    return;
  }
  const auto write = [&](int i, Ints x) {
    store_factors(out + i / kGroup * stride * run + i % kGroup / 4 * kFactorWords, x);
  };
  if (encoding_ == Encoding::kByRow) {
    const size_t i = (size_t)first + at;
    int32_t total;
    scales_[i] = quantize(values, padded_, &total, write);
    biases_[i] = -128 * total;
    return;
  }
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> totals, half_totals;
  scales.resize(groups_);
  totals.resize(groups_);
  half_totals.resize(2 * groups_);
  quantize_groups(values, groups_, scales.data(), totals.data(), has_halves_ ? half_totals.data() : nullptr, write);
  for (int g = 0; g < groups_; ++g) {
    const size_t i = (size_t)first * groups_ + g * stride + at;
    scales_[i] = scales[g];
    biases_[i] = -128 * totals[g];
    offsets_[i] = scales[g] * totals[g];
  }
  if (has_halves_) {
    for (int g = 0; g < 2 * groups_; ++g) {
      const size_t i = (size_t)first * 2 * groups_ + g * stride + at;
      half_biases_[i] = -32 * half_totals[g];
      half_offsets_[i] = scales[g / 2] * half_totals[g];
    }
  }
}

Tile Activations::tile(int i) const {
  const size_t first = tiling_.first(i);
  return {tiling_.size(i),
          data_.data() + first * words_,
          scales_.data() + first * groups_,
          biases_.data() + first * groups_,
          offsets_.data() + first * groups_,
          has_halves_ ? half_biases_.data() + first * 2 * groups_ : nullptr,
          has_halves_ ? half_offsets_.data() + first * 2 * groups_ : nullptr};
}

}  // namespace penstock
