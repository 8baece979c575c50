// A number that threads wait on. They spin briefly, then sleep until it changes.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

// Tests start more threads than the machine has cores, so they build with fewer.
#ifndef PENSTOCK_SPINS
#define PENSTOCK_SPINS 2000
#endif

namespace penstock {

inline int64_t clock_ns(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

// The wait never calls sched_yield. That call gives up the rest of the time slice (100 ms here) and, since Linux
// 6.16, the thread's claim to it as well. Beside two busy loops, it made steps of 33 ms take 14 s.
class alignas(64) WaitWord {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Changes the value and wakes the threads that sleep on it. One thread at a time may call this.
  void set(uint32_t value) {
    if (sleepers_.load(std::memory_order_relaxed) > 0) {
      changed_ns_.store(clock_ns(CLOCK_MONOTONIC), std::memory_order_relaxed);
    }
    value_.store(value, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Waits until the value is not `old`. Returns the nanoseconds for which the thread slept without work: from falling
  // asleep to the change of the value. The time from the change until the thread had a core again does not count.
  int64_t wait_while(uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
      if (value() != old) return 0;
      _mm_pause();
    }
    const int64_t began_ns = clock_ns(CLOCK_MONOTONIC);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value() == old) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return std::max<int64_t>(0, changed_ns_.load(std::memory_order_relaxed) - began_ns);
  }

 private:
  // 20 to 100 µs, depending on the CPU's `pause`. While all threads of a team have a core, they reach a barrier
  // within this time. On a busy machine, a longer spin would take the core from the thread that the others wait for.
  static constexpr int kSpins = PENSTOCK_SPINS;

  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int64_t> changed_ns_{0};
};

// Returns when `is_true()` holds. For flags that another thread sets without waking the waiting one.
template <class Condition>
void poll_until(const Condition& is_true) {
  constexpr timespec kPause{0, 50'000};
  for (int i = 0; !is_true(); ++i) {
    if (i < 2000) {
      _mm_pause();
    } else {
      clock_nanosleep(CLOCK_MONOTONIC, 0, &kPause, nullptr);
    }
  }
}

}  // namespace penstock
