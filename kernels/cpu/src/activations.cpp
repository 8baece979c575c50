#include "activations.h"

#include <cmath>
#include <vector>

namespace penstock {

float quantise_row(const float* values, int count, int8_t* q, int32_t* total) {
  Floats most = zeros(), poison = zeros();
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = load(values + i);
    most = max(most, abs(x));
    // The maximum forgets a NaN; a sum of zero times everything does not.
    poison = fma(x, zeros(), poison);
  }
  const float largest_value = largest(most);
  // Of a row so small that this overflows nothing is left.
  const float steps = 127.f / largest_value;
  const Floats inverse = broadcast(std::isfinite(steps) ? steps : 0.f);
  Ints sums = broadcast_int(0);
  for (int i = 0; i < count; i += kLanes) {
    // The maximum instruction answers its second operand for a NaN, whose integer would overflow the sum.
    const Ints rounded = to_ints(max(load(values + i) * inverse, broadcast(-127.f)));
    sums = sums + rounded;
    store_s8(q + i, rounded);
  }
  *total = sum(sums);
  return largest_value / 127.f + sum(poison);
}

void Activations::prepare(int rows, int columns, Format format) {
  format_ = format;
  tiling_ = Tiling(std::max(rows, 1), format);
  padded_ = round_up(columns, kGroup);
  words_ = padded_ / (format == Format::kBf16 ? 2 : 4);
  groups_ = format == Format::kBf16 || format == Format::kInt8 ? 1 : padded_ / kGroup;
  data_.reserve((size_t)rows * words_);
  scales_.reserve((size_t)rows * groups_);
  biases_.reserve((size_t)rows * groups_);
  offsets_.reserve((size_t)rows * groups_);
}

void Activations::set_row(int row, const float* values) {
  const int tile = tiling_.tile_of(row), first = tiling_.first(tile), stride = tiling_.size(tile), at = row - first;
  const int run = run_words(format_);
  uint32_t* out = data_.data() + (size_t)first * words_ + at * run;
  if (format_ == Format::kBf16) {
    for (int i = 0; i < padded_; i += kGroup, out += stride * run) {
      store_bf16(reinterpret_cast<bf16*>(out), load(values + i));
      store_bf16(reinterpret_cast<bf16*>(out) + kLanes, load(values + i + kLanes));
    }
    return;
  }
  const int group = padded_ / groups_;
  thread_local std::vector<int8_t> q;
  q.resize(padded_);
  for (int g = 0; g < groups_; ++g) {
    const size_t i = (size_t)first * groups_ + g * stride + at;
    int32_t total;
    scales_[i] = quantise_row(values + g * group, group, q.data() + g * group, &total);
    biases_[i] = -128 * total;
    offsets_[i] = scales_[i] * total;
  }
  for (int i = 0; i < padded_; i += kGroup, out += stride * run) std::memcpy(out, q.data() + i, kGroup);
}

Tile Activations::tile(int i) const {
  const size_t first = tiling_.first(i);
  return {tiling_.size(i), data_.data() + first * words_, scales_.data() + first * groups_,
          biases_.data() + first * groups_, offsets_.data() + first * groups_};
}

}  // namespace penstock
