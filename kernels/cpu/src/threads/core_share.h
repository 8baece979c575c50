// Measures which share of its core each thread of a team gets, and chooses how many threads to use.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "threads/wait_word.h"

namespace penstock {

// The CPU time that one thread received, and the time during which it had work to do.
struct CoreUse {
  int64_t cpu_ns = 0;
  int64_t wanted_ns = 0;

  // The thread's share of its core, in [0, 1]; 1 if nothing was measured.
  double share() const { return wanted_ns > 0 ? std::min(1.0, (double)cpu_ns / wanted_ns) : 1.0; }
};

// Returns the number of threads that computes a step fastest. The threads wait for each other at barriers, so n
// threads are only as fast as n times the slowest of them. `shares`: each thread's share of its core, in [0, 1].
inline int best_team_size(std::vector<double> shares) {
  constexpr double kMinGain = 1.25;  // a smaller team must be faster by this factor
  std::sort(shares.begin(), shares.end(), std::greater<>());
  int best = (int)shares.size();
  double best_speed = kMinGain * best * shares.back();
  for (int count = best - 1; count > 0; --count) {
    const double speed = count * shares[count - 1];
    if (speed > best_speed) best = count, best_speed = speed;
  }
  return best;
}

// Returns the share of its core that the calling thread gets. To measure it, the thread consumes 5 ms of CPU time.
inline double measure_core_share() {
  constexpr int64_t kProbeNs = 5'000'000;
  const int64_t began_ns = clock_ns(CLOCK_MONOTONIC), cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  int64_t used_ns = 0;
  while (used_ns < kProbeNs) used_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
  return CoreUse{used_ns, clock_ns(CLOCK_MONOTONIC) - began_ns}.share();
}

}  // namespace penstock
