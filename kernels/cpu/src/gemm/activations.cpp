#include "gemm/activations.h"

#include <algorithm>
#include <array>
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

void set_bf16_run(uint32_t* out, const float* values) {
  store_bf16(reinterpret_cast<bf16*>(out), load(values));
  store_bf16(reinterpret_cast<bf16*>(out) + kLanes, load(values + kLanes));
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
  const Place place = place_of(row);
  const int run = run_words(encoding_);
  uint32_t* out = run_at(place, 0);
  if (encoding_ == Encoding::kBf16) {
    for (int i = 0; i < padded_; i += kGroup, out += place.rows * run) set_bf16_run(out, values + i);
    return;
  }
  const auto write = [&](int i, Ints x) {
    store_factors(out + i / kGroup * place.rows * run + i % kGroup / 4 * kFactorWords, x);
  };
  if (encoding_ == Encoding::kByRow) {
    int32_t total;
    scales_[row] = quantize(values, padded_, &total, write);
    biases_[row] = -128 * total;
    return;
  }
  thread_local std::vector<float> scales;
  thread_local std::vector<int32_t> totals, half_totals;
  scales.resize(groups_);
  totals.resize(groups_);
  half_totals.resize(2 * groups_);
  quantize_groups(values, groups_, scales.data(), totals.data(), has_halves_ ? half_totals.data() : nullptr, write);
  for (int g = 0; g < groups_; ++g) set_scales(place, g, scales[g], totals[g], &half_totals[2 * g]);
}

void Activations::set_group(int first, int count, int group, const float* values) {
  std::array<Place, kMaxRows> places;
  places[0] = place_of(first);
  for (int r = 1; r < count; ++r) places[r] = place_behind(places[r - 1]);
  if (encoding_ == Encoding::kBf16) {
    for (int r = 0; r < count; ++r) set_bf16_run(run_at(places[r], group), values + r * kGroup);
    return;
  }
  std::array<uint32_t*, kMaxRows> runs;
  for (int r = 0; r < count; ++r) runs[r] = run_at(places[r], group);
  std::array<float, kMaxRows> scales;
  std::array<int32_t, kMaxRows> totals;
  std::array<int32_t, 2 * kMaxRows> half_totals;
  // The rows are quantized as the groups of one row are.
  const auto write = [&](int i, Ints x) { store_factors(runs[i / kGroup] + i % kGroup / 4 * kFactorWords, x); };
  quantize_groups(values, count, scales.data(), totals.data(), has_halves_ ? half_totals.data() : nullptr, write);
  if (count > 1 && std::isnan(scales[0])) {
    // A number that is not finite spoils its own row alone.
    for (int r = 0; r < count; ++r) set_group(first + r, 1, group, values + r * kGroup);
    return;
  }
  for (int r = 0; r < count; ++r) set_scales(places[r], group, scales[r], totals[r], &half_totals[2 * r]);
}

Activations::Place Activations::place_of(int row) const {
  const int tile = tiling_.tile_of(row), first = tiling_.first(tile);
  return {tile, first, tiling_.size(tile), row - first};
}

Activations::Place Activations::place_behind(const Place& place) const {
  if (place.at + 1 < place.rows) return {place.tile, place.first, place.rows, place.at + 1};
  return {place.tile + 1, place.first + place.rows, tiling_.size(place.tile + 1), 0};
}

uint32_t* Activations::run_at(const Place& place, int group) const {
  return data_.data() + (size_t)place.first * words_ + ((size_t)group * place.rows + place.at) * run_words(encoding_);
}

void Activations::set_scales(const Place& place, int group, float scale, int32_t total, const int32_t* half_totals) {
  const size_t i = (size_t)place.first * groups_ + group * place.rows + place.at;
  scales_[i] = scale;
  biases_[i] = -128 * total;
  offsets_[i] = scale * total;
  for (int half = 0; has_halves_ && half < 2; ++half) {
    const size_t h = (size_t)place.first * 2 * groups_ + (2 * group + half) * place.rows + place.at;
    half_biases_[h] = -32 * half_totals[half];
    half_offsets_[h] = scale * half_totals[half];
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
