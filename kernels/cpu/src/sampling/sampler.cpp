#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd/simd.h"

namespace penstock {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBuckets = 4096;

struct Best {
  float value;
  bool finite;
};

Best find_best(const float* logits, int vocab) {
  Floats most = broadcast(-kInfinity);
  uint32_t ordered = 0xffff;
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const Floats x = load(logits + i);
    most = max(most, x);
    ordered &= bits(equal(x, x));
  }
  float value = largest(most);
  bool finite = ordered == 0xffff;
  for (; i < vocab; ++i) {
    finite &= logits[i] == logits[i];
    value = std::max(value, logits[i]);
  }
  return {value, finite && std::isfinite(value)};
}

int32_t first_equal(const float* logits, int vocab, float value) {
  return (int32_t)(std::find(logits, logits + vocab, value) - logits);
}

// Applies the penalties. The repetition penalty is that of Keskar et al., arXiv:1909.05858; the others are OpenAI's.
void penalise(float* logits, int vocab, const SamplingRule& rule) {
  thread_local std::vector<int32_t> counts;
  if ((int)counts.size() < vocab) counts.resize(vocab);
  if (rule.repetition_penalty != 1) {
    for (int i = 0; i < rule.num_seen; ++i) {
      float& x = logits[rule.seen[i]];
      if (counts[rule.seen[i]]++ == 0) x = x < 0 ? x * rule.repetition_penalty : x / rule.repetition_penalty;
    }
    for (int i = 0; i < rule.num_seen; ++i) counts[rule.seen[i]] = 0;
  }
  for (int i = rule.num_seen_prompt; i < rule.num_seen; ++i) ++counts[rule.seen[i]];
  for (int i = rule.num_seen_prompt; i < rule.num_seen; ++i) {
    int32_t& count = counts[rule.seen[i]];
    if (count == 0) continue;
    logits[rule.seen[i]] -= rule.frequency_penalty * count;
    logits[rule.seen[i]] -= rule.presence_penalty;
    count = 0;
  }
}

void keep_masked(float* logits, int vocab, const uint32_t* mask) {
  constexpr int kBits = 32;
  for (int first = 0; first < vocab; first += kBits) {
    const uint32_t allowed = mask[first / kBits];
    if (allowed == ~0u) continue;
    for (int i = 0; i < std::min(kBits, vocab - first); ++i) {
      if (!(allowed >> i & 1)) logits[first + i] = -kInfinity;
    }
  }
}

// Log-weights of a row relative to its best token, their weights, and which of them are kept.
class Candidates {
 public:
  Candidates(float* logits, int vocab, float best, float temperature) : logs_(logits), vocab_(vocab) {
    thread_local std::vector<float> weights;
    if ((int)weights.size() < vocab) weights.resize(vocab);
    weights_ = weights.data();
    int i = 0;
    for (; i + kLanes <= vocab; i += kLanes) {
      const Floats l = (load(logits + i) - broadcast(best)) / broadcast(temperature);
      store(logs_ + i, l);
      store(weights_ + i, exp_of_negative(l));
    }
    for (; i < vocab; ++i) {
      logs_[i] = (logits[i] - best) / temperature;
      weights_[i] = std::exp(logs_[i]);
    }
  }

  void keep_min_p(float min_p) { threshold_ = std::log(min_p); }

  // Keeps the k best tokens, and all that equal the last of these.
  void keep_top_k(int k) {
    count_buckets();
    int before = 0, bucket = 0;
    while (bucket < kBuckets && before + sizes_[bucket] < k) before += sizes_[bucket++];
    if (bucket == kBuckets) return;
    std::vector<float> members = members_of(bucket);
    const auto kth = members.begin() + (k - before - 1);
    std::nth_element(members.begin(), kth, members.end(), std::greater<>());
    threshold_ = std::max(threshold_, *kth);
  }

  // Keeps the best tokens while the strictly better ones have less than a share p of the weight, and all that equal
  // the last.
  void keep_top_p(float p) {
    count_buckets();
    double total = 0;
    for (double mass : masses_) total += mass;
    double better = 0;
    int bucket = 0;
    while (bucket + 1 < kBuckets && better + masses_[bucket] < p * total) better += masses_[bucket++];
    std::vector<float> members = members_of(bucket);
    std::sort(members.begin(), members.end(), std::greater<>());
    double equal_mass = 0;
    float last = members.empty() ? threshold_ : members.front();
    for (float l : members) {
      if (l < last) {
        better += equal_mass;
        equal_mass = 0;
        if (better >= p * total) break;
        last = l;
      }
      equal_mass += std::exp(l);
    }
    threshold_ = std::max(threshold_, last);
  }

  // Returns the first id at which the cumulative weight exceeds the share `uniform` of all kept weight.
  int32_t draw(double uniform) const {
    double total = 0;
    for (int i = 0; i < vocab_; i += kLanes) total += block_weight(i);
    const double target = uniform * total;
    double cumulated = 0;
    int32_t last = 0;
    for (int i = 0; i < vocab_; i += kLanes) {
      const double weight = block_weight(i);
      if (weight == 0) continue;
      if (cumulated + weight <= target) {
        cumulated += weight;
        last = last_kept(i);
        continue;
      }
      for (int j = i; j < std::min(i + kLanes, vocab_); ++j) {
        if (!kept(j)) continue;
        last = j;
        cumulated += weights_[j];
        if (cumulated > target) break;
      }
      return last;
    }
    return last;
  }

 private:
  bool kept(int i) const { return logs_[i] >= threshold_ && weights_[i] > 0 && logs_[i] > -kInfinity; }

  int32_t last_kept(int block) const {
    int i = std::min(block + kLanes, vocab_) - 1;
    while (!kept(i)) --i;
    return i;
  }

  // Sums always in the same order, so that two passes agree.
  double block_weight(int block) const {
    double weight = 0;
    if (block + kLanes <= vocab_) {
      const Mask mask = at_least(load(logs_ + block), broadcast(std::max(threshold_, -1e30f)));
      alignas(64) float w[kLanes];
      store(w, select(mask, load(weights_ + block), zeros()));
      for (float x : w) weight += x;
    } else {
      for (int i = block; i < vocab_; ++i) weight += kept(i) ? weights_[i] : 0.f;
    }
    return weight;
  }

  int bucket_of(float l) const { return std::min(kBuckets - 1, (int)(-l * per_unit_)); }

  void count_buckets() {
    float lowest = 0;
    for (int i = 0; i < vocab_; ++i)
      if (kept(i)) lowest = std::min(lowest, logs_[i]);
    // Logits that barely differ share one bucket.
    per_unit_ = kBuckets / -lowest;
    if (!std::isfinite(per_unit_)) per_unit_ = 0;
    sizes_.assign(kBuckets, 0);
    masses_.assign(kBuckets, 0);
    for (int i = 0; i < vocab_; ++i) {
      if (!kept(i)) continue;
      const int bucket = bucket_of(logs_[i]);
      ++sizes_[bucket];
      masses_[bucket] += weights_[i];
    }
  }

  std::vector<float> members_of(int bucket) const {
    std::vector<float> members;
    for (int i = 0; i < vocab_; ++i)
      if (kept(i) && bucket_of(logs_[i]) == bucket) members.push_back(logs_[i]);
    return members;
  }

  float* logs_;
  float* weights_;
  int vocab_;
  float threshold_ = -kInfinity;
  float per_unit_ = 0;
  std::vector<int> sizes_;
  std::vector<double> masses_;
};

void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = (uint64_t)a * b;
  high = product >> 32;
  low = (uint32_t)product;
}

}  // namespace

int32_t sample(float* logits, int vocab, const SamplingRule& rule) {
  Best best = find_best(logits, vocab);
  if (!best.finite) return kFailedToken;
  for (int i = 0; i < rule.num_biased; ++i) logits[rule.biased[i]] += rule.biases[i];
  if (rule.num_seen > 0) penalise(logits, vocab, rule);
  for (int i = 0; i < rule.num_banned; ++i) logits[rule.banned[i]] = -kInfinity;
  if (rule.mask) keep_masked(logits, vocab, rule.mask);
  if (rule.changes_logits()) best = find_best(logits, vocab);
  if (!best.finite) return kFailedToken;
  if (rule.temperature == 0) return first_equal(logits, vocab, best.value);
  Candidates candidates(logits, vocab, best.value, rule.temperature);
  if (rule.min_p > 0) candidates.keep_min_p(rule.min_p);
  if (rule.top_k > 0 && rule.top_k < vocab) candidates.keep_top_k(rule.top_k);
  if (rule.top_p < 1) candidates.keep_top_p(rule.top_p);
  return candidates.draw(sampling_uniform(rule.seed, rule.choice, rule.position));
}

double sampling_uniform(uint64_t seed, int32_t choice, int32_t position) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)choice, 0, 0};
  uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    uint32_t high0, low0, high1, low1;
    multiply_wide(0xD2511F53, c[0], high0, low0);
    multiply_wide(0xCD9E8D57, c[2], high1, low1);
    const uint32_t next[4] = {high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  const uint64_t word = (uint64_t)c[1] << 32 | c[0];
  return (double)(word >> 11) * 0x1p-53;
}

}  // namespace penstock
