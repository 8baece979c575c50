// Keys and values of one layer, paged, in the order in which the dot instructions read them.
//
// Pages are runs of 16 tokens; a scheduler's block is one or more pages that lie together. Of a page and head:
//
//   bf16   keys [head_dim / 2][16 tokens][2], values [8 token pairs][head_dim][2]
//   int8   keys [head_dim / 4][16 tokens][4] u8 (128 + q), values [4 token quadruples][head_dim][4] s8,
//          and a float scale a token for each
#pragma once
#include "memory.h"
#include "simd.h"

namespace penstock {

constexpr int kPage = kLanes;
constexpr int kMaxHeadDim = 256;

enum class KvFormat : int { kBf16 = 0, kInt8 = 1 };

struct KvShape {
  KvFormat format;
  int num_heads, head_dim, block_size, num_blocks;

  int pages_per_block() const { return block_size / kPage; }
  size_t page_elements() const { return (size_t)kPage * head_dim; }
  size_t element_bytes() const { return format == KvFormat::kBf16 ? sizeof(bf16) : 1; }
};

class KvCache {
 public:
  explicit KvCache(const KvShape& shape);

  // Stores a token's key and value [head_dim] of one head at `slot` = block * block_size + offset.
  void set(int slot, int head, const float* key, const float* value) const;
  // Reads them back, dequantised.
  void get(int slot, int head, float* key, float* value) const;
  void clear_block(int block) const;

  const uint8_t* keys(int page, int head) const { return keys_.data() + at(page, head) * shape_.element_bytes(); }
  const uint8_t* values(int page, int head) const { return values_.data() + at(page, head) * shape_.element_bytes(); }
  const float* key_scales(int page, int head) const { return key_scales_.data() + scale_at(page, head); }
  const float* value_scales(int page, int head) const { return value_scales_.data() + scale_at(page, head); }
  const KvShape& shape() const { return shape_; }

 private:
  size_t at(int page, int head) const { return ((size_t)page * shape_.num_heads + head) * shape_.page_elements(); }
  size_t scale_at(int page, int head) const { return ((size_t)page * shape_.num_heads + head) * kPage; }

  KvShape shape_;
  Buffer<uint8_t> keys_, values_;
  Buffer<float> key_scales_, value_scales_;
};

}  // namespace penstock
