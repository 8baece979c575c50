// Keys and values of layers, paged, in the order in which the dot-product instructions read them. A model whose layers
// with windows have blocks of their own has a second cache for these.
//
// A block is one run of memory with the same tokens of each of its layers: [layers][pages][heads] cells. Heads and
// cells may differ between layers. A page is 16 tokens.
//
//   bf16   keys [head_dim / 2][16 tokens][2], values [8 token pairs][head_dim][2];
//   f16    keys [head_dim][16 tokens], values [16 tokens][head_dim];
//   int8   keys [head_dim / 4][16 tokens][4] u8 (128 + q), values [4 token quadruples][head_dim][4] s8,
//          and float scales: values [16 tokens], keys [groups of 32 channels][16 tokens]
#pragma once
#include <bit>
#include <vector>

#include "simd/simd.h"
#include "threads/memory.h"

namespace penstock {

constexpr int kPage = kLanes;
// Tokens whose positions have the same quotient by this may share words of the values, so one thread must store them.
constexpr int kTokensPerWord = 4;
constexpr int kMaxHeadDim = 512;
// Channels of a key in int8 that share a scale. The last group of a head may be smaller.
constexpr int kKeyGroup = 32;

enum class KvFormat : int { kBf16 = 0, kInt8 = 1, kF16 = 2 };

// What a layer keeps of each token.
struct KvShape {
  KvFormat format;
  int num_heads, head_dim, block_size;  // without heads the layer keeps nothing

  int pages_per_block() const { return block_size / kPage; }
  int key_groups() const { return (head_dim + kKeyGroup - 1) / kKeyGroup; }
  // Bytes of a cell's keys; its values take as many.
  size_t half_bytes() const { return (size_t)kPage * head_dim * (format == KvFormat::kInt8 ? 1 : 2); }
  size_t cell_bytes() const {
    return 2 * half_bytes() + (format == KvFormat::kInt8 ? (key_groups() + 1) * kPage * sizeof(float) : 0);
  }
  // Bytes of a block's cells of this layer.
  size_t layer_bytes() const { return pages_per_block() * num_heads * cell_bytes(); }
};

// The cells of one layer.
class KvLayer {
 public:
  // `cells`: those of block 0. The next block's begin `block_bytes` later.
  KvLayer(const KvShape& shape, uint8_t* cells, size_t block_bytes)
      : shape_(shape),
        half_bytes_(shape.half_bytes()),
        cell_bytes_(shape.cell_bytes()),
        block_bytes_(block_bytes),
        pages_shift_(std::countr_zero((unsigned)shape.pages_per_block())),
        cells_(cells) {}

  // Stores a token's key and value, each [head_dim], at `slot` = block * block_size + offset.
  void set(int slot, int head, const float* key, const float* value) const;
  // Clears values after `slot` in its page that earlier sequences left. Their weights are 0, but 0 times NaN is NaN.
  void clear_behind(int slot, int head) const;
  // Prefetches the memory that `set` would write.
  void fetch(int slot, int head) const;
  // Reads a token's key and value back, dequantized.
  void get(int slot, int head, float* key, float* value) const;

  // Where the cell of a sequence's page begins, with its keys. A block has a power of two of pages.
  uint8_t* cell(const int32_t* block_table, int page, int head) const {
    return cell_of_block(block_table[page >> pages_shift_], page & ((1 << pages_shift_) - 1), head);
  }
  uint8_t* cell_of_block(int block, int page, int head) const {
    return cells_ + block * block_bytes_ + ((size_t)page * shape_.num_heads + head) * cell_bytes_;
  }
  uint8_t* cell_of_slot(int slot, int head) const {
    return cell_of_block(slot / shape_.block_size, slot % shape_.block_size / kPage, head);
  }
  uint8_t* values(uint8_t* cell) const { return cell + half_bytes_; }
  float* value_scales(uint8_t* cell) const { return reinterpret_cast<float*>(cell + 2 * half_bytes_); }
  float* key_scales(uint8_t* cell, int group) const { return value_scales(cell) + (group + 1) * kPage; }
  const KvShape& shape() const { return shape_; }

 private:
  const KvShape shape_;
  const size_t half_bytes_, cell_bytes_, block_bytes_;
  const int pages_shift_;
  uint8_t* const cells_;
};

class KvCache {
 public:
  // layers: all with blocks of one size. `is_shared`: whether all layers use the same cells, one after another.
  KvCache(const std::vector<KvShape>& layers, int num_blocks, bool is_shared = false);

  // Lets the heads of a page be near different cores: a huge page would have them all. Nothing may be stored yet.
  void use_small_pages() const { memory_.use_small_pages(); }

  const KvLayer& layer(int index) const { return layers_[index]; }

  // The number of slices of a block that threads copy separately.
  int num_slices() const { return (int)((block_bytes_ + kSliceBytes - 1) / kSliceBytes); }
  // Copies one slice of each of `count` blocks, from copies[2 * i] to copies[2 * i + 1], in this order. No slice
  // reads what another one writes, so threads need not wait for each other.
  void copy_slice(const int32_t* copies, int count, int slice) const;

 private:
  static constexpr size_t kSliceBytes = 16 << 10;

  const size_t block_bytes_;
  Buffer<uint8_t> memory_;
  std::vector<KvLayer> layers_;
};

}  // namespace penstock
