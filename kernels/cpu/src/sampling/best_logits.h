// The best logit of each row of a product, found while its panels are computed in any order by several threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "sampling/sampler.h"
#include "simd/simd.h"
#include "weights/weights.h"

namespace penstock {

// The best logit of a row, or of a part of its panels.
struct BestLogit {
  float value;
  int32_t token;
  int32_t is_finite;  // whether no logit is NaN

  // Takes another part into account. Of equal logits the lowest id wins.
  void join(const BestLogit& other) {
    is_finite &= other.is_finite;
    const bool wins = other.value > value || (other.value == value && other.token < token);
    if (wins) std::tie(value, token) = std::tie(other.value, other.token);
  }
  // The token of a whole row; kFailedToken if a logit is NaN, or if the best one is infinite.
  int32_t chosen() const { return is_finite && std::isfinite(value) ? token : kFailedToken; }
};

class BestLogits {
 public:
  // Forgets all logits, for a product of `num_rows` rows on `num_threads` threads.
  void reset(int num_rows, int num_threads) {
    num_rows_ = num_rows;
    num_threads_ = num_threads;
    bests_.assign((size_t)num_rows * num_threads, {-std::numeric_limits<float>::infinity(), 0, 1});
  }

  // Notes a panel of a row's logits. logits: [kPanel].
  void note(int thread, int row, int panel, const float* logits) {
    BestLogit& best = bests_[(size_t)thread * num_rows_ + row];
    const Floats a = load(logits), b = load(logits + kLanes);
    best.is_finite &= (bits(equal(a, a)) & bits(equal(b, b))) == 0xffff;
    const Floats both = max(a, b);
    if (!bits(at_least(both, broadcast(best.value)))) return;
    const float value = largest(both);
    const int token = panel * kPanel + (int)(std::find(logits, logits + kPanel, value) - logits);
    // Panels come in any order, so compare the ids as well.
    if (value > best.value || token < best.token) std::tie(best.value, best.token) = std::tie(value, token);
  }

  // Returns the best logit of a row over all threads, whichever thread found it.
  BestLogit best(int row) const {
    BestLogit best = bests_[row];
    for (int t = 1; t < num_threads_; ++t) best.join(bests_[(size_t)t * num_rows_ + row]);
    return best;
  }

 private:
  int num_rows_ = 0, num_threads_ = 0;
  std::vector<BestLogit> bests_;  // [threads][rows]
};

}  // namespace penstock
