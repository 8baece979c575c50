#include "sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd/simd.h"

namespace penstock {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Weights that are summed in single precision before their sum is added in double precision.
constexpr int kSpan = 64 * kLanes;

float best_of(const float* logits, int vocab) {
  Floats most = broadcast(kLowest);
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) most = max(most, load(logits + i));
  return i < vocab ? std::max(largest(most), *std::max_element(logits + i, logits + vocab)) : largest(most);
}

double log_sum_exp(const float* logits, int vocab, float best) {
  double total = 0;
  int i = 0;
  while (i + kLanes <= vocab) {
    Floats sums = zeros();
    const int end = std::min(vocab - vocab % kLanes, i + kSpan);
    for (; i < end; i += kLanes) sums = sums + exp_of_negative(load(logits + i) - broadcast(best));
    alignas(64) float parts[kLanes];
    store(parts, sums);
    for (float part : parts) total += part;
  }
  for (; i < vocab; ++i) total += std::exp(logits[i] - best);
  return best + std::log(total);
}

// The best tokens so far, in descending order.
class Top {
 public:
  Top(int count, int32_t* ids, float* logits) : count_(count), ids_(ids), logits_(logits) {
    std::fill(ids, ids + count, 0);
    std::fill(logits, logits + count, kLowest);
  }

  float least() const { return logits_[count_ - 1]; }

  void offer(int32_t id, float logit) {
    if (!(logit > least())) return;
    int at = count_ - 1;
    for (; at > 0 && logits_[at - 1] < logit; --at) {
      ids_[at] = ids_[at - 1];
      logits_[at] = logits_[at - 1];
    }
    ids_[at] = id;
    logits_[at] = logit;
  }

 private:
  int count_;
  int32_t* ids_;
  float* logits_;
};

void find_top(const float* logits, int vocab, int count, int32_t* ids, float* values) {
  Top top(count, ids, values);
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    if (!bits(at_least(load(logits + i), broadcast(top.least())))) continue;
    for (int j = i; j < i + kLanes; ++j) top.offer(j, logits[j]);
  }
  for (; i < vocab; ++i) top.offer(i, logits[i]);
}

}  // namespace

void write_logprobs(const float* logits, int vocab, int32_t token, int count, int32_t* ids, float* values) {
  const double total = log_sum_exp(logits, vocab, best_of(logits, vocab));
  ids[0] = token;
  values[0] = logits[token];
  if (count > 0) find_top(logits, vocab, count, ids + 1, values + 1);
  for (int i = 0; i <= count; ++i) values[i] = (float)(values[i] - total);
}

}  // namespace penstock
