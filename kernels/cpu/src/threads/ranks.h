// Chooses which threads of a team run programs, and which core each thread uses.
#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace penstock {

// The order of a team's threads. The threads of the first `active()` ranks run programs, the others do not. Rank 0
// belongs to thread 0, which leads. Threads and cores are counted from 0; thread i begins on core i.
class Ranks {
 public:
  explicit Ranks(int size) : entries_(size) { grow(size); }

  int size() const { return (int)entries_.size(); }
  int active() const { return active_; }
  int thread(int rank) const { return entries_[rank].thread; }
  int core(int rank) const { return entries_[rank].core; }

  // Keeps the `count` cores with the largest shares. `shares`: those that the threads of ranks [0, active()) got of
  // their cores. No inactive thread becomes active: nothing is known about its core, and it may be measuring it.
  void shrink(int count, const std::vector<double>& shares) {
    std::vector<std::pair<double, Entry>> by_share;
    for (int rank = 0; rank < active_; ++rank) by_share.emplace_back(shares[rank], entries_[rank]);
    std::stable_sort(by_share.begin(), by_share.end(), [](auto& a, auto& b) { return a.first > b.first; });
    for (int rank = 0; rank < active_; ++rank) entries_[rank] = by_share[rank].second;
    active_ = count;
    lead();
  }

  // Lets the first `count` threads run programs, each on the core it began on.
  void grow(int count) {
    for (int i = 0; i < size(); ++i) entries_[i] = {i, i};
    active_ = count;
  }

 private:
  struct Entry {
    int thread, core;
  };

  // Gives rank 0 to the leader. If the leader's core is not among the active ones, it exchanges its core with the last
  // active thread.
  void lead() {
    int rank = 0;
    while (entries_[rank].thread != 0) ++rank;
    if (rank >= active_) {
      std::swap(entries_[rank].thread, entries_[active_ - 1].thread);
      rank = active_ - 1;
    }
    std::swap(entries_[rank], entries_[0]);
  }

  std::vector<Entry> entries_;  // by rank
  int active_ = 0;
};

}  // namespace penstock
