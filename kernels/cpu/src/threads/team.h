// A team of threads that computes steps. All threads run the same program and share the iterations of its loops.
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
#include "threads/ranks.h"
#include "threads/time_slice.h"
#include "threads/wait_word.h"

namespace penstock {

class Team;

// One thread's view of the program that its team runs.
class Worker {
 public:
  Worker(Team& team, int index) : team_(team), index_(index) {}

  // The thread's index, in [0, threads of this program).
  int index() const { return index_; }
  bool leads() const { return index_ == 0; }
  // Whether the team's cores are on several NUMA nodes. Loops over weights and KV heads then put the items of a panel or
  // head side by side, so that the threads of one node take them in each step.
  bool spans_nodes() const;

  // Notes that this thread has slept without work, outside of a barrier. Its core was not busy then.
  void note_slept(int64_t slept_ns) { slept_ns_ += slept_ns; }

  // Calls `body(i)` for every i in [0, count), divided among the threads, and returns when all threads have finished.
  // Each thread first works through a contiguous part of its own, because long runs stream best from memory. Then it
  // helps with the other parts, because a thread may lose its core to another process for a while.
  template <class Body>
  void for_each(int count, const Body& body) {
    for_each(count, body, [] {});
  }
  // As above. One thread calls `finish` when all have finished, and then they return.
  template <class Body, class Finish>
  void for_each(int count, const Body& body, const Finish& finish);

 private:
  friend class Team;

  Team& team_;
  int index_;
  uint32_t loop_ = 0;
  int64_t slept_ns_ = 0;
};

class Team {
 public:
  // `cores`: null, or the core to pin each thread to. The first core is for the leader, which is the thread that
  // calls `join`. The leader is pinned once it calls `bind_leader`.
  explicit Team(int size, const int32_t* cores = nullptr)
      : ranks_(size), slots_(size), counters_((size_t)kCounters * size) {
    if (cores) cores_.assign(cores, cores + size);
    try {
      for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      // The system can start no more threads. End those that run: destroying a running std::thread ends the process.
      end();
      throw;
    }
  }

  // `join` must have returned for the last program.
  ~Team() { end(); }

  int size() const { return ranks_.size(); }
  bool spans_nodes() const { return !nodes_.empty(); }
  // The thread whose part a thread works on after `count` others, its own part being the first: those of its NUMA node
  // come before those of others.
  int victim(int index, int count) const {
    return nodes_.empty() ? (index + count) % active() : victims_[(size_t)index * active() + count];
  }
  // The number of threads that run the next program.
  int active() const { return ranks_.active(); }

  // Declares that the calling thread does nothing but `start` and `join`. It is then scheduled like the team's
  // threads.
  void bind_leader() {
    slots_[0].thread = gettid();
    schedule(0);
  }

  // Sets the NUMA node of each core. `join` must have returned for the last program.
  void set_nodes(const int32_t* nodes) {
    nodes_.assign(nodes, nodes + size());
    if (std::all_of(nodes_.begin(), nodes_.end(), [this](int32_t node) { return node == nodes_[0]; })) nodes_.clear();
    order_victims();
  }

  // Starts `program` on the team's own threads. `join` must have returned for the previous program.
  void start(std::function<void(Worker&)> program) {
    program_ = std::move(program);
    is_started_ = true;
    launch();
  }

  // Runs the calling thread's share of the program, if one was started. Returns when all threads have finished it.
  void join() {
    if (!is_started_) return;
    is_started_ = false;
    run(slots_[0]);
    if (active() > 1) {
      for (uint32_t done; (done = done_.value()) != num_programs_;) done_.wait_while(done);
    }
    if (window_ns_ >= kWindowNs) judge();
  }

  // Runs later programs on `count` threads: those that recently got the largest shares of their cores, if they are
  // fewer than before. The others sleep. `join` must have returned for the last program.
  void resize(int count) {
    if (count < active()) {
      const int before = active();
      ranks_.shrink(count, shares());
      for (int rank = count; rank < before; ++rank) slot(rank).probed_share = 0;
    } else {
      // A thread that runs a program before it has seen its probe would run the program twice.
      poll_until([this] { return !is_probing(); });
      ranks_.grow(count);
    }
    order_victims();
    for (int i = 0; i < size(); ++i) schedule(i);
  }

 private:
  friend class Worker;
  static constexpr int kCounters = 4;
  static constexpr int kProbe = -1;
  static constexpr int64_t kWindowNs = 300'000'000;        // program time between two checks of the shares
  static constexpr int64_t kProbeEveryNs = 2'000'000'000;  // between probes of inactive threads
  static constexpr double kCrowded = 0.75, kQuiet = 0.92;  // below: short time slices; above: long
  static constexpr double kRegained = 0.8;                 // share at which an inactive thread rejoins

  // How many items of one thread's part have been taken.
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };

  struct ThreadSlot {
    WaitWord launched;             // number of programs and probes this thread was told to run
    std::atomic<int> rank{0};      // its index in the next program, or kProbe
    std::atomic<pid_t> thread{0};  // 0 until known
    CoreUse use;
    std::atomic<bool> is_probing{false};
    double probed_share = 0;  // share of its core at the last probe
  };

  void end() {
    program_ = nullptr;
    for (int i = 1; i < size(); ++i) wake(slots_[i], i);
    for (auto& thread : threads_) thread.join();
  }

  // The slot of the thread with this rank.
  ThreadSlot& slot(int rank) { return slots_[ranks_.thread(rank)]; }

  // The shares of their cores that the active threads got since the last check, by rank.
  std::vector<double> shares() {
    std::vector<double> shares;
    for (int rank = 0; rank < active(); ++rank) shares.push_back(slot(rank).use.share());
    return shares;
  }

  bool is_probing() const {
    const auto probes = [](const ThreadSlot& slot) { return slot.is_probing.load(std::memory_order_acquire); };
    return std::any_of(slots_.begin(), slots_.end(), probes);
  }

  Counter& counter(uint32_t loop, int thread) { return counters_[loop % kCounters * size() + thread]; }

  void launch() {
    ++num_programs_;
    unfinished_.store(active() - 1, std::memory_order_relaxed);
    for (int rank = 1; rank < active(); ++rank) wake(slot(rank), rank);
  }

  static void wake(ThreadSlot& slot, int rank) {
    slot.rank = rank;
    slot.launched.set(slot.launched.value() + 1);
  }

  void serve(int index) {
    pthread_setname_np(pthread_self(), "penstock-cpu");
    ThreadSlot& slot = slots_[index];
    slot.thread = gettid();
    schedule(index);
    for (uint32_t seen = 0;; ++seen) {
      // Steps follow each other closely, so the spin of `wait_while` usually saves a wake-up.
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
    Worker worker(*this, slot.rank);
    const int64_t began_ns = clock_ns(CLOCK_MONOTONIC), cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    program_(worker);
    slot.use.cpu_ns += clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
    const int64_t took_ns = clock_ns(CLOCK_MONOTONIC) - began_ns;
    slot.use.wanted_ns += took_ns - worker.slept_ns_;
    if (worker.leads()) window_ns_ += took_ns;
  }

  // Adapts the team to the shares that its threads got since the last check. A thread that loses its core delays all
  // others at every barrier.
  void judge() {
    const std::vector<double> shares = this->shares();
    const double least = *std::min_element(shares.begin(), shares.end());
    const bool was_crowded = is_crowded_;
    is_crowded_ = least < (is_crowded_ ? kQuiet : kCrowded);
    const int best = best_team_size(shares);
    if (best < active()) {
      resize(best);
      probed_ns_ = clock_ns(CLOCK_MONOTONIC);
    } else if (is_crowded_ != was_crowded) {
      for (int i = 0; i < size(); ++i) schedule(i);
    } else if (active() < size()) {
      probe();
    }
    for (ThreadSlot& slot : slots_) slot.use = {};
    window_ns_ = 0;
  }

  // Lets the inactive threads measure their cores from time to time, and activates them once all their cores are
  // free.
  void probe() {
    if (is_probing()) return;
    bool is_free = true;
    for (int rank = active(); rank < size(); ++rank) is_free &= slot(rank).probed_share >= kRegained;
    const int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    if (is_free) {
      resize(size());
    } else if (now_ns - probed_ns_ >= kProbeEveryNs) {
      probed_ns_ = now_ns;
      for (int rank = active(); rank < size(); ++rank) {
        slot(rank).is_probing = true;
        wake(slot(rank), kProbe);
      }
    }
  }

  void order_victims() {
    if (nodes_.empty()) return;
    victims_.clear();
    for (int index = 0; index < active(); ++index) {
      const auto begin = victims_.end() - victims_.begin();
      for (int k = 0; k < active(); ++k) victims_.push_back((index + k) % active());
      const int node = nodes_[ranks_.core(index)];
      std::stable_partition(victims_.begin() + begin, victims_.end(),
                            [&](int rank) { return nodes_[ranks_.core(rank)] == node; });
    }
  }

  // Tells Linux on which cores a thread may run and how long its time slices are.
  void schedule(int index) {
    const pid_t thread = slots_[index].thread;
    if (!thread) return;
    request_time_slice(thread, is_crowded_ ? kDefaultSliceNs : kLongSliceNs);
    if (cores_.empty()) return;
    // Each thread has a core of its own: otherwise Linux may put two threads that wake each other on the same core
    // for milliseconds.
    int rank = 0;
    while (ranks_.thread(rank) != index) ++rank;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    CPU_SET(cores_[ranks_.core(rank)], &allowed);
    sched_setaffinity(thread, sizeof allowed, &allowed);
  }

  // Waits for all threads at the end of a loop; `loop` counts the loops of this program. The last thread to arrive
  // resets the loop's counters, and calls `finish` while the others wait.
  template <class Finish>
  void barrier(Worker& worker, uint32_t loop, const Finish& finish) {
    const uint32_t generation = generation_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active() - 1) {
      for (int i = 0; i < active(); ++i) counter(loop, i).taken.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      finish();
      generation_.set(generation + 1);
    } else {
      while (generation_.value() == generation) worker.slept_ns_ += generation_.wait_while(generation);
    }
  }

  Ranks ranks_;
  std::vector<int32_t> cores_;  // the core to pin a thread to, by the core's index in `ranks_`
  std::vector<int32_t> nodes_;  // the NUMA node of each core; empty if there is one
  std::vector<int> victims_;    // [active threads][active threads]
  bool is_crowded_ = false;
  int64_t probed_ns_ = 0;
  int64_t window_ns_ = 0;  // program time since the last check
  std::function<void(Worker&)> program_;
  uint32_t num_programs_ = 0;
  bool is_started_ = false;
  std::vector<ThreadSlot> slots_;
  WaitWord done_;        // number of the last program that all threads have finished
  WaitWord generation_;  // of the barrier
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<Counter> counters_;
  std::vector<std::thread> threads_;
};

inline bool Worker::spans_nodes() const { return team_.spans_nodes(); }

template <class Body, class Finish>
void Worker::for_each(int count, const Body& body, const Finish& finish) {
  const int num_threads = team_.active();
  for (int k = 0; k < num_threads; ++k) {
    const int owner = team_.victim(index_, k);
    const int begin = (int)((int64_t)count * owner / num_threads),
              end = (int)((int64_t)count * (owner + 1) / num_threads);
    auto& taken = team_.counter(loop_, owner).taken;
    for (;;) {
      const int left = end - begin - taken.load(std::memory_order_relaxed);
      if (left <= 0) break;
      const int chunk = (left + 1) / 2, first = begin + taken.fetch_add(chunk, std::memory_order_relaxed);
      for (int i = first; i < std::min(first + chunk, end); ++i) body(i);
    }
  }
  team_.barrier(*this, loop_++, finish);
}

}  // namespace penstock
