#include "attention/kv_cache.h"

#include <algorithm>

#include "gemm/activations.h"

namespace penstock {
namespace {

constexpr float kMaxF16 = 65504;

// Index of element d of token t in a cell's keys, which are words of `per_word` elements, and in its values.
size_t key_at(int d, int t, int per_word) { return ((size_t)d / per_word * kPage + t) * per_word + d % per_word; }
size_t value_at(int d, int t, int per_word, int head_dim) {
  return ((size_t)t / per_word * head_dim + d) * per_word + t % per_word;
}

// Writes each of the integers x into its word at `words`: the low `width` bits of it, at bit `at`.
void put_into_words(uint8_t* words, Ints x, int width, int at) {
  int32_t* out = reinterpret_cast<int32_t*>(words);
  const uint32_t others = ~(((1u << width) - 1) << at);
  store_ints(out, (load_ints(out) & broadcast_int((int32_t)others)) | shift_left(x, at));
}

// Writes [head_dim] as f16. A finite number outside its range becomes the largest one; infinity becomes NaN.
void store_saturated(f16* out, const float* x, int head_dim) {
  for (int d = 0; d < head_dim; d += kLanes) {
    const Floats number = load(x + d), inside = min(max(number, broadcast(-kMaxF16)), broadcast(kMaxF16));
    store_f16(out + d, fma(number, zeros(), inside));
  }
}

// Bytes of a block.
size_t bytes_of(const std::vector<KvShape>& layers, bool is_shared) {
  size_t bytes = 0;
  for (const KvShape& shape : layers) {
    bytes = is_shared ? std::max(bytes, shape.layer_bytes()) : bytes + shape.layer_bytes();
  }
  return bytes;
}

}  // namespace

void KvLayer::set(int slot, int head, const float* key, const float* value) const {
  const int t = slot % kPage, dim = shape_.head_dim;
  uint8_t *keys = cell_of_slot(slot, head), *out = values(keys);
  if (shape_.format == KvFormat::kBf16) {
    alignas(64) bf16 k[kMaxHeadDim], v[kMaxHeadDim];
    for (int d = 0; d < dim; d += kLanes) {
      store_bf16(k + d, load(key + d));
      store_bf16(v + d, load(value + d));
    }
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + key_at(d, t, 2) * sizeof(bf16), k + d, 2 * sizeof(bf16));
    uint8_t* pairs = out + value_at(0, t - t % 2, 2, dim) * sizeof(bf16);
    for (int d = 0; d < dim; d += kLanes) put_into_words(pairs + d * 4, widen_u16(v + d), 16, t % 2 * 16);
    return;
  }
  if (shape_.format == KvFormat::kF16) {
    alignas(64) f16 k[kMaxHeadDim];
    store_saturated(k, key, dim);
    for (int d = 0; d < dim; ++d) reinterpret_cast<f16*>(keys)[key_at(d, t, 1)] = k[d];
    store_saturated(reinterpret_cast<f16*>(out) + value_at(0, t, 1, dim), value, dim);
    return;
  }
  alignas(64) int8_t k[kMaxHeadDim], v[kMaxHeadDim];
  int32_t unused;
  const float value_scale = quantize_row(value, dim, v, &unused);
  value_scales(keys)[t] = value_scale;
  // A non-finite value makes the key's scales NaN, so that it shows in the scores: quantized weights cannot hold NaN.
  for (int group = 0, d = 0; d < dim; ++group, d += kKeyGroup) {
    key_scales(keys, group)[t] = quantize_row(key + d, std::min(kKeyGroup, dim - d), k + d, &unused) + 0 * value_scale;
  }
  for (int d = 0; d < dim; d += 4) {
    uint32_t word;
    std::memcpy(&word, k + d, sizeof word);
    // Keys are stored as unsigned bytes 128 + q.
    word ^= 0x80808080;
    std::memcpy(keys + key_at(d, t, 4), &word, sizeof word);
  }
  uint8_t* quads = out + value_at(0, t - t % 4, 4, dim);
  for (int d = 0; d < dim; d += kLanes) put_into_words(quads + d * 4, widen_u8(v + d), 8, t % 4 * 8);
}

void KvLayer::clear_behind(int slot, int head) const {
  // int8 cannot hold NaN, so a zero weight masks it.
  if (shape_.format == KvFormat::kInt8) return;
  const int t = slot % kPage, dim = shape_.head_dim, row_bytes = dim * 4;
  uint8_t* own = values(cell_of_slot(slot, head));
  if (shape_.format == KvFormat::kF16) {
    f16* behind = reinterpret_cast<f16*>(own) + value_at(0, t + 1, 1, dim);
    std::memset(behind, 0, (kPage - 1 - t) * dim * sizeof(f16));
    return;
  }
  uint8_t* pairs = own + t / 2 * row_bytes;
  for (int d = 0; t % 2 == 0 && d < dim; d += kLanes) put_into_words(pairs + d * 4, broadcast_int(0), 16, 16);
  std::memset(pairs + row_bytes, 0, (size_t)(kPage / 2 - 1 - t / 2) * row_bytes);
}

void KvLayer::fetch(int slot, int head) const {
  const uint8_t* cell = cell_of_slot(slot, head);
  for (size_t i = 0; i < cell_bytes_; i += kLine) _mm_prefetch(cell + i, _MM_HINT_T0);
}

void KvLayer::get(int slot, int head, float* key, float* value) const {
  const int t = slot % kPage, dim = shape_.head_dim;
  uint8_t *k = cell_of_slot(slot, head), *v = values(k);
  for (int d = 0; d < dim; ++d) {
    if (shape_.format == KvFormat::kBf16) {
      key[d] = widen(reinterpret_cast<const bf16*>(k)[key_at(d, t, 2)]);
      value[d] = widen(reinterpret_cast<const bf16*>(v)[value_at(d, t, 2, dim)]);
    } else if (shape_.format == KvFormat::kF16) {
      key[d] = widen_f16(reinterpret_cast<const f16*>(k)[key_at(d, t, 1)]);
      value[d] = widen_f16(reinterpret_cast<const f16*>(v)[value_at(d, t, 1, dim)]);
    } else {
      key[d] = key_scales(k, d / kKeyGroup)[t] * (k[key_at(d, t, 4)] - 128);
      value[d] = value_scales(k)[t] * (int8_t)v[value_at(d, t, 4, dim)];
    }
  }
}

KvCache::KvCache(const std::vector<KvShape>& layers, int num_blocks, bool is_shared)
    : block_bytes_(bytes_of(layers, is_shared)), memory_(num_blocks * block_bytes_) {
  layers_.reserve(layers.size());
  uint8_t* cells = memory_.data();
  for (const KvShape& shape : layers) {
    layers_.emplace_back(shape, cells, block_bytes_);
    if (!is_shared) cells += shape.layer_bytes();
  }
}

void KvCache::copy_slice(const int32_t* copies, int count, int slice) const {
  const size_t begin = slice * kSliceBytes, bytes = std::min(kSliceBytes, block_bytes_ - begin);
  for (int i = 0; i < count; ++i) {
    const uint8_t* from = memory_.data() + copies[2 * i] * block_bytes_ + begin;
    std::memcpy(memory_.data() + copies[2 * i + 1] * block_bytes_ + begin, from, bytes);
  }
}

}  // namespace penstock
