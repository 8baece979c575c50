// Zeroed memory, aligned for the kernels' loads. Linux maps its pages on first use, as huge pages where it can.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace penstock {

// Bytes of a cache line.
constexpr int kLine = 64;

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) : count_(count) {
    if (count == 0) return;
    data_ = static_cast<T*>(allocate(num_bytes()));
    owns_ = true;
  }
  // Borrows memory, which its owner must keep alive for longer than this buffer.
  Buffer(T* data, size_t count) : data_(data), count_(count) {}
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        count_(std::exchange(other.count_, 0)),
        owns_(std::exchange(other.owns_, false)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(owns_, other.owns_);
    return *this;
  }
  ~Buffer() {
    if (owns_) release(data_, num_bytes());
  }

  T* data() const { return data_; }
  size_t count() const { return count_; }
  T& operator[](size_t i) const { return data_[i]; }

  // Lets Linux place each small page where it is first used.
  void use_small_pages() const {
#ifndef __SANITIZE_ADDRESS__
    if (owns_) madvise(data_, num_bytes(), MADV_NOHUGEPAGE);
#endif
  }

  // Grows the buffer to at least `count` elements. Growing discards the old contents.
  void reserve(size_t count) {
    if (count > count_) *this = Buffer(count);
  }

 private:
  static constexpr size_t kHugePage = 2 << 20;
  // No padding is needed: the kernels prefetch past the end but never read there.
  size_t num_bytes() const { return count_ * sizeof(T); }

#ifdef __SANITIZE_ADDRESS__
  // The sanitizer checks bounds only for memory that comes from the allocator.
  static void* allocate(size_t bytes) { return std::memset(::operator new(bytes, kAlignment), 0, bytes); }
  static void release(void* data, size_t) { ::operator delete(data, kAlignment); }
  static constexpr std::align_val_t kAlignment{64};
#else
  static void* allocate(size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    if (bytes >= kHugePage) madvise(mapped, bytes, MADV_HUGEPAGE);
    return mapped;
  }
  static void release(void* data, size_t bytes) { munmap(data, bytes); }
#endif

  T* data_ = nullptr;
  size_t count_ = 0;
  bool owns_ = false;
};

}  // namespace penstock
