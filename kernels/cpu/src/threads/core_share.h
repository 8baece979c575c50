// How much of its core each thread of a team gets, and how many threads are worth using.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "threads/wait_word.h"

namespace penstock {

// What one thread got of its core while it had something to compute.
struct CoreUse {
  int64_t cpu_ns = 0;
  int64_t wanted_ns = 0;

  // In [0, 1]; 1 where nothing was measured.
  double share() const { return wanted_ns > 0 ? std::min(1.0, (double)cpu_ns / wanted_ns) : 1.0; }
};

// How many threads compute a step fastest. All threads wait for each other at barriers, so a team of n threads is as fast as
// n times its slowest one. `shares`: what each thread gets of its core.
inline int best_team_size(std::vector<double> shares) {
  constexpr double kMinGain = 1.25;  // a smaller team must be clearly faster
  std::sort(shares.begin(), shares.end(), std::greater<>());
  int best = (int)shares.size();
  double best_speed = kMinGain * best * shares.back();
  for (int count = best - 1; count > 0; --count) {
    const double speed = count * shares[count - 1];
    if (speed > best_speed) best = count, best_speed = speed;
  }
  return best;
}

// What a thread gets of a core that it asks for some milliseconds of, for nothing but to find that out.
inline double measure_core_share() {
  constexpr int64_t kProbeNs = 5'000'000;
  const int64_t began_ns = clock_ns(CLOCK_MONOTONIC), cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  int64_t used_ns = 0;
  while (used_ns < kProbeNs) used_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
  return CoreUse{used_ns, clock_ns(CLOCK_MONOTONIC) - began_ns}.share();
}

}  // namespace penstock
