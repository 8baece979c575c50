#include "gemm/low_rank.h"

#include <algorithm>

namespace penstock {
namespace {

// Inner numbers that are summed side by side. One sum alone would wait for the latency of each addition.
constexpr int kSums = kRegisters >= 32 ? 8 : 4;

}  // namespace

LowRank::LowRank(const LowRankPart* parts, int num_parts, int rows, int columns, const WeightTransform& transform)
    : columns_(round_up(columns, kLanes)) {
  for (int i = 0; i < num_parts; ++i) rank_ += parts[i].rank;
  if (rank_ == 0) return;
  down_ = Buffer<bf16>((size_t)rank_ * columns_);
  rows = round_up(rows, kPanel);
  std::vector<float> dense((size_t)rank_ * rows);
  int first = 0;
  for (int i = 0; i < num_parts; first += parts[i++].rank) {
    const LowRankPart& part = parts[i];
    set_down(first, part, columns, transform);
    for (int k = 0; k < part.rank; ++k) {
      float* row = &dense[(size_t)(first + k) * rows];
      for (int r = 0; r < part.count; ++r) {
        row[packed_row((RowLayout)part.layout, part.first, r)] = part.up[r * part.rank + k];
      }
      if (transform.outputs) transform.outputs->apply(row, row);
    }
  }
  set_up(dense, rows);
}

void LowRank::set_down(int first, const LowRankPart& part, int columns, const WeightTransform& transform) {
  std::vector<float> row(columns_);
  for (int k = 0; k < part.rank; ++k) {
    const float* down = part.down + (size_t)k * columns;
    for (int c = 0; c < columns; ++c) row[c] = down[c] * (transform.gains ? transform.gains[c] : 1.f);
    if (transform.columns) transform.columns->apply(row.data(), row.data());
    for (int c = 0; c < columns; ++c) down_[(size_t)(first + k) * columns_ + c] = narrow(row[c]);
  }
}

void LowRank::set_up(const std::vector<float>& dense, int rows) {
  for (int begin = 0; begin < rows; begin += kLanes) {
    const auto reaches = [&](int k) {
      const float* row = &dense[(size_t)k * rows + begin];
      return std::any_of(row, row + kLanes, [](float value) { return value != 0; });
    };
    int first = 0, end = rank_;
    while (first < end && !reaches(first)) ++first;
    while (first < end && !reaches(end - 1)) --end;
    runs_.push_back({first, end, up_.size()});
    for (int k = first; k < end; ++k) {
      for (int i = 0; i < kLanes; ++i) up_.push_back(narrow(dense[(size_t)k * rows + begin + i]));
    }
  }
}

void LowRank::shrink(const float* x, float* inner) const {
  for (int k = 0; k < rank_; k += kSums) {
    const int count = std::min(kSums, rank_ - k);
    Floats sums[kSums];
    for (Floats& one : sums) one = zeros();
    for (int c = 0; c < columns_; c += kLanes) {
      const Floats values = load(x + c);
      for (int i = 0; i < count; ++i) sums[i] = fma(load_bf16(&down_[(size_t)(k + i) * columns_ + c]), values, sums[i]);
    }
    for (int i = 0; i < count; ++i) inner[k + i] = sum(sums[i]);
  }
}

void LowRank::expand(const float* inner, int panel, float* out) const {
  for (int half = 0; half < kPanel / kLanes; ++half) {
    const Run& run = runs_[panel * (kPanel / kLanes) + half];
    const bf16* weights = up_.data() + run.at;
    Floats total = load(out + half * kLanes);
    for (int k = run.first; k < run.end; ++k, weights += kLanes) {
      total = fma(load_bf16(weights), broadcast(inner[k]), total);
    }
    store(out + half * kLanes, total);
  }
}

}  // namespace penstock
