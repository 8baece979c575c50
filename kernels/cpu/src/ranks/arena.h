// Memory that the ranks of a group share for one step. All of them place the same rows in it, in the same order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

#include "threads/memory.h"

namespace penstock {

class Arena {
 public:
  // Without `memory` it only counts what is placed.
  explicit Arena(uint8_t* memory = nullptr, size_t size = 0) : memory_(memory), size_(size) {}

  bool only_counts() const { return !memory_; }
  size_t used() const { return used_; }

  // Returns memory for `count` elements; it holds anything. Throws std::bad_alloc if that is more than there is.
  template <class T>
  Buffer<T> place(size_t count) {
    const size_t begin = used_;
    used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    if (!memory_) return Buffer<T>();
    if (used_ > size_) throw std::bad_alloc();
    return Buffer<T>(reinterpret_cast<T*>(memory_ + begin), count);
  }

 private:
  uint8_t* memory_;
  size_t size_, used_ = 0;
};

}  // namespace penstock
