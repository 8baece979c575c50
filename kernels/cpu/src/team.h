// The threads that compute a step together: all run the same program and share out the items of each of its loops.
#pragma once
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "long_turns.h"

namespace penstock {

class Team;

// A thread's place in its team.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}

  int index() const { return index_; }
  bool leads() const { return index_ == 0; }

  // Calls `body(i)` for the items of [0, count) that fall to this thread, and comes back when all threads' are done.
  // Each thread goes through an equal part of its own, since long runs stream best, and then through what is left of the
  // others', since one that has to give its core to another process now and then is slower.
  template <class Body>
  void for_each(int count, const Body& body);

 private:
  Team& team_;
  int index_;
  uint32_t loop_ = 0;
};

class Team {
 public:
  // `cores`, null or one for each thread, says where the team's own threads stay; the caller's may be anywhere.
  explicit Team(int size, const int32_t* cores = nullptr) : size_(size), counters_((size_t)kCounters * size) {
    try {
      for (int i = 1; i < size; ++i) {
        threads_.emplace_back([this, i] { serve(i); });
        if (cores) stay_on(threads_.back(), cores[i]);
      }
    } catch (...) {
      // The system has no more of them: those that run would end the process with their handles.
      end();
      throw;
    }
  }

  // What was started must have been joined.
  ~Team() { end(); }

  int size() const { return size_; }

  // Starts `program` on the team's own threads; `join` must have come back from the one before.
  void start(std::function<void(Member&)> program) {
    program_ = std::move(program);
    is_started_ = true;
    launch();
  }

  // Runs the caller's share of the program, if one was started, and comes back when all threads have left it.
  void join() {
    if (!is_started_) return;
    is_started_ = false;
    Member member(*this, 0);
    program_(member);
    for (int i = 0; running_.load(std::memory_order_acquire) != 0; ++i) pause_or_yield(i);
  }

 private:
  friend class Member;
  static constexpr int kPauses = 2000;
  static constexpr int kYields = 200;
  static constexpr int kCounters = 4;

  // Of the items of a thread's part, those that were taken.
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };

  void end() {
    program_ = nullptr;
    launch();
    for (auto& thread : threads_) thread.join();
  }

  Counter& counter(uint32_t loop, int thread) { return counters_[loop % kCounters * size_ + thread]; }

  void launch() {
    running_.store(size_ - 1, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }

  // Else two threads that wake each other are put on one core, and stay there for milliseconds.
  static void stay_on(std::thread& thread, int core) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    CPU_SET(core, &allowed);
    pthread_setaffinity_np(thread.native_handle(), sizeof allowed, &allowed);
  }

  void serve(int index) {
    pthread_setname_np(pthread_self(), "penstock-cpu");
    take_long_turns();
    uint32_t seen = 0;
    for (;;) {
      await_launch(seen);
      seen = epoch_.load(std::memory_order_acquire);
      if (!program_) return;
      Member member(*this, index);
      program_(member);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Steps follow each other closely: a short spin saves the wake-up, then the core goes to who needs it.
  void await_launch(uint32_t seen) {
    for (int i = 0; i < kPauses; ++i) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      _mm_pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      sched_yield();
    }
    while (epoch_.load(std::memory_order_acquire) == seen) epoch_.wait(seen);
  }

  // `loop` counts the loops of this program; the last thread to arrive clears the counters that were used.
  void barrier(uint32_t loop) {
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      for (int i = 0; i < size_; ++i) counter(loop, i).taken.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; turn_.load(std::memory_order_acquire) == turn; ++i) pause_or_yield(i);
  }

  // A thread that spins on would keep the core from the one it waits for.
  static void pause_or_yield(int attempt) {
    if (attempt < kPauses) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }

  const int size_;
  std::function<void(Member&)> program_;
  bool is_started_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
  std::vector<Counter> counters_;
  std::vector<std::thread> threads_;
};

template <class Body>
void Member::for_each(int count, const Body& body) {
  for (int k = 0; k < team_.size_; ++k) {
    const int owner = (index_ + k) % team_.size_;
    const int begin = (int)((int64_t)count * owner / team_.size_), end = (int)((int64_t)count * (owner + 1) / team_.size_);
    auto& taken = team_.counter(loop_, owner).taken;
    for (;;) {
      const int left = end - begin - taken.load(std::memory_order_relaxed);
      if (left <= 0) break;
      const int chunk = (left + 1) / 2, first = begin + taken.fetch_add(chunk, std::memory_order_relaxed);
      for (int i = first; i < std::min(first + chunk, end); ++i) body(i);
    }
  }
  team_.barrier(loop_++);
}

}  // namespace penstock
