// The best logit of each row of a product, found while its panels are computed in any order by several threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "weights/weights.h"
#include "sampling/sampler.h"
#include "simd/simd.h"

namespace penstock {

class BestLogits {
 public:
  // Forgets all logits, for a product of `num_rows` rows on `num_threads` threads.
  void reset(int num_rows, int num_threads) {
    num_rows_ = num_rows;
    num_threads_ = num_threads;
    bests_.assign((size_t)num_rows * num_threads, {-std::numeric_limits<float>::infinity(), 0, true});
  }

  // Notes a panel of a row's logits. logits: [kPanel].
  void note(int thread, int row, int panel, const float* logits) {
    Best& best = bests_[(size_t)thread * num_rows_ + row];
    const Floats a = load(logits), b = load(logits + kLanes);
    best.finite &= (bits(equal(a, a)) & bits(equal(b, b))) == 0xffff;
    const Floats both = max(a, b);
    if (!bits(at_least(both, broadcast(best.value)))) return;
    const float value = largest(both);
    const int token = panel * kPanel + (int)(std::find(logits, logits + kPanel, value) - logits);
    // Panels come in any order, so compare the ids as well.
    if (value > best.value || token < best.token) std::tie(best.value, best.token) = std::tie(value, token);
  }

  // Returns the best token over all threads. Of equal logits the lowest id wins, whichever thread found it. Returns
  // kFailedToken if a logit is NaN, or if the best one is infinite.
  int32_t token(int row) const {
    Best best = bests_[row];
    for (int t = 1; t < num_threads_; ++t) {
      const Best& other = bests_[(size_t)t * num_rows_ + row];
      best.finite &= other.finite;
      const bool wins = other.value > best.value || (other.value == best.value && other.token < best.token);
      if (wins) std::tie(best.value, best.token) = std::tie(other.value, other.token);
    }
    return best.finite && std::isfinite(best.value) ? best.token : kFailedToken;
  }

 private:
  struct Best {
    float value;
    int32_t token;
    bool finite;
  };

  int num_rows_ = 0, num_threads_ = 0;
  std::vector<Best> bests_;  // [threads][rows]
};

}  // namespace penstock
