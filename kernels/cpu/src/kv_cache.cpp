#include "kv_cache.h"

#include "activations.h"

namespace penstock {
namespace {

// Where element d of token t lies in a page of keys, words of `per_word` elements, and in a page of values.
size_t key_at(int d, int t, int per_word) { return ((size_t)d / per_word * kPage + t) * per_word + d % per_word; }
size_t value_at(int d, int t, int per_word, int head_dim) {
  return ((size_t)t / per_word * head_dim + d) * per_word + t % per_word;
}

}  // namespace

KvCache::KvCache(const KvShape& shape) : shape_(shape) {
  const size_t heads = (size_t)shape.num_blocks * shape.pages_per_block() * shape.num_heads;
  const size_t bytes = heads * shape.page_elements() * shape.element_bytes();
  keys_ = Buffer<uint8_t>(bytes);
  values_ = Buffer<uint8_t>(bytes);
  if (shape.format == KvFormat::kInt8) {
    key_scales_ = Buffer<float>(heads * kPage);
    value_scales_ = Buffer<float>(heads * kPage);
  }
}

void KvCache::set(int slot, int head, const float* key, const float* value) const {
  const int page = slot / kPage, t = slot % kPage, dim = shape_.head_dim;
  uint8_t* keys = keys_.data() + at(page, head) * shape_.element_bytes();
  uint8_t* values = values_.data() + at(page, head) * shape_.element_bytes();
  if (shape_.format == KvFormat::kBf16) {
    alignas(64) bf16 k[kMaxHeadDim], v[kMaxHeadDim];
    for (int d = 0; d < dim; d += kLanes) {
      store_bf16(k + d, load(key + d));
      store_bf16(v + d, load(value + d));
    }
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + key_at(d, t, 2) * sizeof(bf16), k + d, 2 * sizeof(bf16));
    for (int d = 0; d < dim; ++d) reinterpret_cast<bf16*>(values)[value_at(d, t, 2, dim)] = v[d];
    return;
  }
  alignas(64) int8_t k[kMaxHeadDim], v[kMaxHeadDim];
  int32_t unused;
  const float value_scale = quantise_row(value, dim, v, &unused);
  value_scales_[scale_at(page, head) + t] = value_scale;
  // A value that is not finite shows in the scores: weights lose a NaN when they are quantised.
  key_scales_[scale_at(page, head) + t] = quantise_row(key, dim, k, &unused) + 0 * value_scale;
  for (int d = 0; d < dim; ++d) keys[key_at(d, t, 4)] = k[d] + 128;
  for (int d = 0; d < dim; ++d) values[value_at(d, t, 4, dim)] = v[d];
}

void KvCache::get(int slot, int head, float* key, float* value) const {
  const int page = slot / kPage, t = slot % kPage, dim = shape_.head_dim;
  const uint8_t *k = keys(page, head), *v = values(page, head);
  for (int d = 0; d < dim; ++d) {
    if (shape_.format == KvFormat::kBf16) {
      key[d] = widen(reinterpret_cast<const bf16*>(k)[key_at(d, t, 2)]);
      value[d] = widen(reinterpret_cast<const bf16*>(v)[value_at(d, t, 2, dim)]);
    } else {
      key[d] = key_scales(page, head)[t] * (k[key_at(d, t, 4)] - 128);
      value[d] = value_scales(page, head)[t] * (int8_t)v[value_at(d, t, 4, dim)];
    }
  }
}

void KvCache::clear_block(int block) const {
  const int page = block * shape_.pages_per_block();
  const size_t heads = (size_t)shape_.pages_per_block() * shape_.num_heads;
  const size_t bytes = heads * shape_.page_elements() * shape_.element_bytes();
  std::memset(keys_.data() + at(page, 0) * shape_.element_bytes(), 0, bytes);
  std::memset(values_.data() + at(page, 0) * shape_.element_bytes(), 0, bytes);
  if (shape_.format == KvFormat::kInt8) {
    std::memset(key_scales_.data() + scale_at(page, 0), 0, heads * kPage * sizeof(float));
    std::memset(value_scales_.data() + scale_at(page, 0), 0, heads * kPage * sizeof(float));
  }
}

}  // namespace penstock
