// A model's place in its group of ranks: what it meets the others for, and the memory that it shares with them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ranks/arena.h"
#include "ranks/exchange.h"
#include "threads/team.h"

namespace penstock {

class RankGroup {
 public:
  // A rank that is alone meets no other rank, and shares no memory.
  RankGroup(int rank, int size) : exchange_(rank, size) {}

  bool is_alone() const { return exchange_.size() == 1; }
  bool leads() const { return exchange_.rank() == 0; }
  int rank() const { return exchange_.rank(); }
  int size() const { return exchange_.size(); }

  // Sets the shared memory; no step may be running. `memory` may move and grow between steps.
  void use(ExchangeState* state, uint8_t* memory, size_t size) {
    exchange_.use(state);
    memory_ = memory;
    memory_size_ = size;
  }
  Arena arena() const { return Arena(memory_, memory_size_); }

  // Begins a step on this rank, before its threads run.
  void begin() { ending_ = Ending::kDone; }

  // Tells the others that this rank cannot compute the step, and waits until they know.
  void refuse() {
    if (is_alone()) return;
    int64_t slept_ns = 0;
    ending_ = exchange_.vote(true, slept_ns);
  }

  // The first meeting of a step: all ranks have memory for it, or none of them computes it.
  void vote(Worker& worker) {
    by_one_thread(worker, [this](int64_t& slept_ns) { ending_ = exchange_.vote(false, slept_ns); });
  }

  // Waits for the threads of this rank, then for the other ranks. Afterwards each rank sees what all have written.
  void meet(Worker& worker) {
    by_one_thread(worker, [this](int64_t& slept_ns) {
      if (!exchange_.meet(slept_ns)) ending_ = Ending::kAborted;
    });
  }

  // Whether the rest of the step is to be left out. All threads of a rank get the same answer between two meetings.
  bool is_over() const { return ending_ != Ending::kDone; }
  Ending ending() const { return ending_; }

 private:
  // Lets one thread meet the other ranks while those beside it wait at the barrier.
  template <class Meet>
  void by_one_thread(Worker& worker, const Meet& meet) {
    if (is_alone()) return;
    worker.for_each(
        0, [](int) {},
        [&] {
          int64_t slept_ns = 0;
          meet(slept_ns);
          worker.note_slept(slept_ns);
        });
  }

  Exchange exchange_;
  uint8_t* memory_ = nullptr;
  size_t memory_size_ = 0;
  Ending ending_ = Ending::kDone;
};

}  // namespace penstock
