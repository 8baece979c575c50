// Where the ranks of a group meet: words in memory that all of them map. Each rank is a process, or a thread of one.
//
// A rank that waits spins briefly, then sleeps. It wakes at least every kLookNs to look whether the group was aborted.
// So a rank that dies anywhere, with any word half written, keeps no other rank for longer.
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

#include "threads/wait_word.h"

namespace penstock {

constexpr int kMaxRanks = 64;

// A number in shared memory that processes wait on.
struct alignas(64) SharedWord {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  void set(uint32_t next) {
    value.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) wake();
  }
  void wake() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  // Waits until the value is not `old`, `is_over()` holds, or about `patience_ns` have passed. Returns when it fell asleep
  // after so many spins, or 0 if it did not.
  template <class IsOver>
  int64_t wait_while(uint32_t old, int64_t patience_ns, const IsOver& is_over, int spins = kSpins) {
    for (int i = 0; i < spins; ++i) {
      if (value.load(std::memory_order_acquire) != old) return 0;
      _mm_pause();
    }
    const int64_t began_ns = clock_ns(CLOCK_MONOTONIC), ends_ns = began_ns + patience_ns;
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_acquire) == old && !is_over()) {
      const int64_t left_ns = ends_ns - clock_ns(CLOCK_MONOTONIC);
      if (left_ns <= 0) break;
      const timespec pause{0, (long)std::min(left_ns, kLookNs)};
      syscall(SYS_futex, &value, FUTEX_WAIT, old, &pause, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return began_ns;
  }

  // As in WaitWord.
  static constexpr int kSpins = PENSTOCK_SPINS;

 private:
  static constexpr int64_t kLookNs = 100'000'000;
};

// What one rank shows to the others. Only that rank writes it.
struct alignas(64) RankState {
  std::atomic<uint64_t> meetings;     // it has arrived at
  std::atomic<int64_t> waited_ns;     // at meetings, for the slowest rank
  std::atomic<int64_t> exchanged_ns;  // from the arrival of the slowest rank until this one went on
  std::atomic<uint32_t> is_waiting;   // whether it waits at a meeting
};

// All zeros at first. `penstock.gpu_node.model.ranks.control` reads and writes the same words.
struct ExchangeState {
  SharedWord step;        // number of the messages that rank 0 has handed out
  SharedWord generation;  // of the meetings
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> aborted;      // not 0: the group ends
  alignas(64) std::atomic<uint32_t> refused;      // not 0: a rank lacks memory for this step
  alignas(64) std::atomic<int64_t> completed_ns;  // when the last rank arrived at the last meeting
  RankState ranks[kMaxRanks];
};

// How a step ended, or what its vote came to.
enum class Ending : int { kDone = 0, kNoMemory = 1, kAborted = 2 };

class Exchange {
 public:
  Exchange(int rank, int size) : rank_(rank), size_(size) {}

  void use(ExchangeState* state) { state_ = state; }
  ExchangeState& state() const { return *state_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Returns once every rank has called this as often as this one: true, or false if the group is aborted. Adds the time
  // that the thread slept without work to `slept_ns`.
  bool meet(int64_t& slept_ns) {
    constexpr int64_t kForEver = INT64_MAX / 2;
    RankState& own = state_->ranks[rank_];
    SharedWord& generation = state_->generation;
    const auto is_aborted = [this] { return state_->aborted.load(std::memory_order_acquire) != 0; };
    const uint32_t before = generation.value.load(std::memory_order_acquire);
    add(own.meetings, uint64_t{1});
    const int64_t arrived_ns = clock_ns(CLOCK_MONOTONIC);
    if (state_->arrived.fetch_add(1, std::memory_order_acq_rel) == (uint32_t)size_ - 1) {
      state_->arrived.store(0, std::memory_order_relaxed);
      state_->completed_ns.store(arrived_ns, std::memory_order_relaxed);
      generation.set(before + 1);
      return !is_aborted();
    }
    own.is_waiting.store(1, std::memory_order_relaxed);
    int64_t slept_since_ns = 0;
    while (generation.value.load(std::memory_order_acquire) == before && !is_aborted()) {
      slept_since_ns = generation.wait_while(before, kForEver, is_aborted, spins_);
      spins_ = slept_since_ns ? std::max(kLeastSpins, spins_ / 2) : std::min(kMostSpins, spins_ * 2);
    }
    own.is_waiting.store(0, std::memory_order_relaxed);
    const int64_t completed_ns = state_->completed_ns.load(std::memory_order_relaxed);
    if (slept_since_ns) slept_ns += std::max<int64_t>(0, completed_ns - slept_since_ns);
    add(own.waited_ns, std::max<int64_t>(0, completed_ns - arrived_ns));
    add(own.exchanged_ns, std::max<int64_t>(0, clock_ns(CLOCK_MONOTONIC) - std::max(completed_ns, arrived_ns)));
    return !is_aborted();
  }

  // Meets the other ranks to learn whether all of them can do the last message: kDone if so, kNoMemory if one refuses.
  Ending vote(bool refuses, int64_t& slept_ns) {
    if (refuses) state_->refused.store(1, std::memory_order_release);
    if (!meet(slept_ns)) return Ending::kAborted;
    if (state_->refused.load(std::memory_order_acquire) == 0) return Ending::kDone;
    // Rank 0 clears the word with the next message. No rank may still have to read it then.
    return meet(slept_ns) ? Ending::kNoMemory : Ending::kAborted;
  }

 private:
  template <class Number>
  static void add(std::atomic<Number>& number, Number more) {
    number.store(number.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  // Sleeping and waking up takes as long as a matrix of a small step. So where spinning has helped, the next spin may take
  // longer, up to some 400 µs. Where a rank lacks a core, spinning only takes the core from it, and soon ends.
  static constexpr int kLeastSpins = PENSTOCK_SPINS / 8, kMostSpins = 8 * PENSTOCK_SPINS;

  const int rank_, size_;
  int spins_ = SharedWord::kSpins;
  ExchangeState* state_ = nullptr;
};

}  // namespace penstock
