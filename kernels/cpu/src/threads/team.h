// The threads that compute a step together: all run the same program and share out the items of each of its loops.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "threads/core_share.h"
#include "threads/time_slice.h"
#include "threads/wait_word.h"

namespace penstock {

class Team;

// One thread's part in a program of its team.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}

  // In [0, threads of this program).
  int index() const { return index_; }
  bool leads() const { return index_ == 0; }

  // Calls `body(i)` for the items of [0, count) that fall to this thread, and comes back when all threads' are done.
  // Each thread goes through an equal part of its own, since long runs stream best, and then through what is left of the
  // others', since one that has to give its core to another process now and then is slower.
  template <class Body>
  void for_each(int count, const Body& body);

 private:
  friend class Team;

  Team& team_;
  int index_;
  uint32_t loop_ = 0;
  int64_t slept_ns_ = 0;  // at barriers
};

class Team {
 public:
  // `cores`, null or one for each thread, says where the threads stay; the first is the leader's, the thread that calls
  // `join`, from `bind_leader` on.
  explicit Team(int size, const int32_t* cores = nullptr)
      : size_(size), active_(size), slots_(size), counters_((size_t)kCounters * size) {
    if (cores) cores_.assign(cores, cores + size);
    for (int i = 0; i < size; ++i) order_.push_back(i);
    try {
      for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      // The system has no more of them: those that run would end the process with their handles.
      end();
      throw;
    }
  }

  // What was started must have been joined.
  ~Team() { end(); }

  int size() const { return size_; }
  // Threads that the next program runs on.
  int active() const { return active_; }

  // Says that the calling thread does nothing but `start` and `join`: it is scheduled as the team's own threads are.
  void bind_leader() {
    slots_[0].thread = gettid();
    schedule(0);
  }

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
    run(slots_[0]);
    if (active_ > 1) {
      for (uint32_t done; (done = done_.value()) != num_programs_;) done_.wait_while(done);
    }
    if (window_ns_ >= kWindowNs) judge();
  }

  // Runs what follows on the `count` threads that got most of their cores lately. The others sleep.
  void resize(int count) {
    active_ = count;
    const auto gets_more = [this](int a, int b) { return slots_[a].use.share() > slots_[b].use.share(); };
    for (int i = 0; i < size_; ++i) order_[i] = i;
    best_cores_ = order_;
    std::stable_sort(order_.begin() + 1, order_.end(), gets_more);  // the leader is never left out
    std::stable_sort(best_cores_.begin(), best_cores_.end(), gets_more);
    best_cores_.resize(count);
    for (int rank = count; rank < size_; ++rank) slots_[order_[rank]].probed_share = 0;
    for (int i = 0; i < size_; ++i) schedule(i);
  }

 private:
  friend class Member;
  static constexpr int kCounters = 4;
  static constexpr int kProbe = -1;
  static constexpr int64_t kWindowNs = 300'000'000;         // of programs, between two looks at the shares
  static constexpr int64_t kProbeEveryNs = 2'000'000'000;  // while threads are left out
  static constexpr double kCrowded = 0.75, kQuiet = 0.92;  // shares below and above which time slices change
  static constexpr double kRegained = 0.8;                 // share at which a thread that was left out comes back

  // Of the items of a thread's part, those that were taken.
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };

  struct ThreadSlot {
    WaitWord launched;         // counts what this thread was told to run
    std::atomic<int> rank{0};  // its index in the next program, or kProbe
    std::atomic<pid_t> thread{0};  // 0: not known
    CoreUse use;
    std::atomic<bool> is_probing{false};
    double probed_share = 0;  // of the last probe
  };

  void end() {
    program_ = nullptr;
    active_ = size_;
    for (int i = 0; i < size_; ++i) order_[i] = i;
    launch();
    for (auto& thread : threads_) thread.join();
  }

  Counter& counter(uint32_t loop, int thread) { return counters_[loop % kCounters * size_ + thread]; }

  void launch() {
    ++num_programs_;
    unfinished_.store(active_ - 1, std::memory_order_relaxed);
    for (int rank = 1; rank < active_; ++rank) {
      ThreadSlot& slot = slots_[order_[rank]];
      slot.rank = rank;
      slot.launched.set(slot.launched.value() + 1);
    }
  }

  void serve(int index) {
    pthread_setname_np(pthread_self(), "penstock-cpu");
    ThreadSlot& slot = slots_[index];
    slot.thread = gettid();
    schedule(index);
    for (uint32_t seen = 0;; ++seen) {
      // Steps follow each other closely: the spin saves the wake-up.
      while (slot.launched.value() == seen) slot.launched.wait_while(seen);
      if (slot.rank == kProbe) {
        slot.probed_share = measure_core_share();
        slot.is_probing.store(false, std::memory_order_release);
        continue;
      }
      if (!program_) return;
      run(slot);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.set(num_programs_);
    }
  }

  void run(ThreadSlot& slot) {
    Member member(*this, slot.rank);
    const int64_t began_ns = clock_ns(CLOCK_MONOTONIC), cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    program_(member);
    slot.use.cpu_ns += clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
    const int64_t took_ns = clock_ns(CLOCK_MONOTONIC) - began_ns;
    slot.use.wanted_ns += took_ns - member.slept_ns_;
    if (member.leads()) window_ns_ += took_ns;
  }

  // Reacts to what the threads got of their cores since the last call: a thread whose core is taken holds all others up at
  // every barrier.
  void judge() {
    std::vector<double> shares;
    for (int rank = 0; rank < active_; ++rank) shares.push_back(slots_[order_[rank]].use.share());
    const double least = *std::min_element(shares.begin(), shares.end());
    const bool was_crowded = is_crowded_;
    is_crowded_ = least < (is_crowded_ ? kQuiet : kCrowded);
    const int best = best_team_size(shares);
    if (best < active_) {
      resize(best);
      probed_ns_ = clock_ns(CLOCK_MONOTONIC);
    } else if (is_crowded_ != was_crowded) {
      for (int i = 0; i < size_; ++i) schedule(i);
    } else if (active_ < size_) {
      probe();
    }
    for (ThreadSlot& slot : slots_) slot.use = {};
    window_ns_ = 0;
  }

  // Takes the threads that were left out back once their cores are free again, and has them find out now and then.
  void probe() {
    bool is_free = true;
    for (int rank = active_; rank < size_; ++rank) {
      const ThreadSlot& slot = slots_[order_[rank]];
      if (slot.is_probing.load(std::memory_order_acquire)) return;
      is_free &= slot.probed_share >= kRegained;
    }
    const int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    if (is_free) {
      resize(size_);
    } else if (now_ns - probed_ns_ >= kProbeEveryNs) {
      probed_ns_ = now_ns;
      for (int rank = active_; rank < size_; ++rank) {
        ThreadSlot& slot = slots_[order_[rank]];
        slot.is_probing = true;
        slot.rank = kProbe;
        slot.launched.set(slot.launched.value() + 1);
      }
    }
  }

  // Tells the system where a thread may run and how long its time slices are.
  void schedule(int index) {
    const pid_t thread = slots_[index].thread;
    if (!thread) return;
    request_time_slice(thread, is_crowded_ ? kDefaultSliceNs : kLongSliceNs);
    if (cores_.empty()) return;
    // Each thread has a core of its own, else two that wake each other are put on one and stay there for milliseconds.
    // Where some are left out, the others share the best cores.
    const auto end = order_.begin() + active_;
    const bool is_active = std::find(order_.begin(), end, index) != end;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (active_ == size_ || !is_active) CPU_SET(cores_[index], &allowed);
    if (active_ < size_ && is_active) {
      for (const int slot : best_cores_) CPU_SET(cores_[slot], &allowed);
    }
    sched_setaffinity(thread, sizeof allowed, &allowed);
  }

  // `loop` counts the loops of this program; the last thread to arrive clears the counters that were used.
  void barrier(Member& member, uint32_t loop) {
    const uint32_t generation = generation_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
      for (int i = 0; i < active_; ++i) counter(loop, i).taken.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      generation_.set(generation + 1);
    } else {
      while (generation_.value() == generation) member.slept_ns_ += generation_.wait_while(generation);
    }
  }

  const int size_;
  int active_;
  std::vector<int32_t> cores_;
  std::vector<int> order_;       // the slots by rank; the leader's is the first
  std::vector<int> best_cores_;  // the slots whose cores are used, while some are left out
  bool is_crowded_ = false;
  int64_t probed_ns_ = 0;
  int64_t window_ns_ = 0;  // how long programs took since the last look
  std::function<void(Member&)> program_;
  uint32_t num_programs_ = 0;
  bool is_started_ = false;
  std::vector<ThreadSlot> slots_;
  WaitWord done_;        // number of the last program that all threads have left
  WaitWord generation_;  // of the barrier
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<Counter> counters_;
  std::vector<std::thread> threads_;
};

template <class Body>
void Member::for_each(int count, const Body& body) {
  const int num_threads = team_.active_;
  for (int k = 0; k < num_threads; ++k) {
    const int owner = (index_ + k) % num_threads;
    const int begin = (int)((int64_t)count * owner / num_threads), end = (int)((int64_t)count * (owner + 1) / num_threads);
    auto& taken = team_.counter(loop_, owner).taken;
    for (;;) {
      const int left = end - begin - taken.load(std::memory_order_relaxed);
      if (left <= 0) break;
      const int chunk = (left + 1) / 2, first = begin + taken.fetch_add(chunk, std::memory_order_relaxed);
      for (int i = first; i < std::min(first + chunk, end); ++i) body(i);
    }
  }
  team_.barrier(*this, loop_++);
}

}  // namespace penstock
