#include "weights/weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "weights/k_quants.h"

namespace penstock {
namespace {

constexpr size_t kInt8GroupBytes = kPanel * sizeof(f16) + kPanel * kGroup;
constexpr size_t kInt4GroupBytes = 2 * kPanel * sizeof(f16) + kPanel * kGroup / 2;

struct Q4_0Block {
  f16 scale;
  uint8_t nibbles[16];
};
struct Q4_1Block {
  f16 scale, minimum;
  uint8_t nibbles[16];
};
struct Q8_0Block {
  f16 scale;
  int8_t values[32];
};

// A group of 32 weights, as in GGUF: w = scale * q + minimum with q in [0, 15].
struct Group4 {
  f16 scale, minimum;
  uint8_t q[kGroup];
};
// w = scale * q with q in [-128, 127].
struct Group8 {
  f16 scale;
  int8_t q[kGroup];
};

int lane_in_panel(int row) { return row % kPanel; }

void unpack_nibbles(const uint8_t* nibbles, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = nibbles[i] & 15;
    q[16 + i] = nibbles[i] >> 4;
  }
}

// Rounds x up to an f16, so that the quantized values stay in their range.
f16 scale_at_least(float x) {
  f16 scale = narrow_f16(x);
  return widen_f16(scale) < x ? f16(scale + 1) : scale;
}

// Returns 0, or NaN if a weight is not finite. Searching for the largest number does not detect a NaN.
float poison_of(const float* w, int count) {
  float poison = 0;
  for (int i = 0; i < count; ++i) poison += 0 * w[i];
  return poison;
}

Group4 quantise4(const float* w) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  Group4 group{};
  group.minimum = narrow_f16(*low + poison_of(w, kGroup));
  const float minimum = widen_f16(group.minimum);
  group.scale = scale_at_least(std::max(0.f, *high - minimum) / 15);
  const float scale = widen_f16(group.scale);
  for (int i = 0; i < kGroup; ++i) {
    group.q[i] = scale > 0 ? std::clamp<long>(std::lrint((w[i] - minimum) / scale), 0, 15) : 0;
  }
  return group;
}

Group8 quantise8(const float* w) {
  float most = 0;
  for (int i = 0; i < kGroup; ++i) most = std::max(most, std::fabs(w[i]));
  Group8 group{};
  group.scale = scale_at_least(most / 127 + poison_of(w, kGroup));
  const float scale = widen_f16(group.scale);
  for (int i = 0; i < kGroup; ++i) group.q[i] = scale > 0 ? std::lrint(w[i] / scale) : 0;
  return group;
}

Group4 read_group4(Source source, const uint8_t* data, const float* w, int g) {
  if (source == Source::kQ4_1) {
    const auto& block = reinterpret_cast<const Q4_1Block*>(data)[g];
    Group4 group{block.scale, block.minimum, {}};
    unpack_nibbles(block.nibbles, group.q);
    return group;
  }
  if (source == Source::kQ4_0) {
    const auto& block = reinterpret_cast<const Q4_0Block*>(data)[g];
    Group4 group{block.scale, narrow_f16(-8 * widen_f16(block.scale)), {}};
    unpack_nibbles(block.nibbles, group.q);
    return group;
  }
  return quantise4(w + g * kGroup);
}

Group8 read_group8(Source source, const uint8_t* data, const float* w, int g) {
  if (source != Source::kQ8_0) return quantise8(w + g * kGroup);
  const auto& block = reinterpret_cast<const Q8_0Block*>(data)[g];
  Group8 group{block.scale, {}};
  std::copy_n(block.values, kGroup, group.q);
  return group;
}

size_t byte_at(int column, int lane) { return (column / 4 * kPanel + lane) * 4 + column % 4; }

size_t nibble_at(int column, int lane) { return (column / 8 * kPanel + lane) * 4 + column % 4; }

void put_group8(uint8_t* at, int lane, const Group8& group) {
  reinterpret_cast<f16*>(at)[lane] = group.scale;
  uint8_t* bytes = at + kPanel * sizeof(f16);
  for (int i = 0; i < kGroup; ++i) bytes[byte_at(i, lane)] = group.q[i] + 128;
}

void put_group4(uint8_t* at, int lane, const Group4& group) {
  reinterpret_cast<f16*>(at)[lane] = group.scale;
  reinterpret_cast<f16*>(at)[kPanel + lane] = group.minimum;
  uint8_t* pairs = at + 2 * kPanel * sizeof(f16);
  for (int i = 0; i < kGroup; ++i) {
    uint8_t& pair = pairs[nibble_at(i, lane)];
    pair = i % 8 < 4 ? (pair & 0xf0) | group.q[i] : (pair & 0x0f) | group.q[i] << 4;
  }
}

void put_int8(uint8_t* panel, int lane, const float* w, int padded) {
  float most = 0;
  for (int i = 0; i < padded; ++i) most = std::max(most, std::fabs(w[i]));
  const float scale = most / 127 + poison_of(w, padded);
  for (int i = 0; i < padded; ++i) panel[byte_at(i, lane)] = 128 + (scale > 0 ? std::lrint(w[i] / scale) : 0);
  reinterpret_cast<float*>(panel + (size_t)padded * kPanel)[lane] = scale;
}

// Returns the bytes of a panel with that many columns.
size_t bytes_of_panel(Format format, int columns) {
  const size_t padded = round_up(columns, kGroup);
  if (is_k_quant(format) && columns % kKBlock) throw std::invalid_argument("a k-quant needs a multiple of 256 columns");
  switch (format) {
    case Format::kBf16:
      return padded * kPanel * sizeof(bf16);
    case Format::kInt8:
      return padded * kPanel + kPanel * sizeof(float);
    case Format::kInt8Group:
      return padded / kGroup * kInt8GroupBytes;
    case Format::kInt4Group:
      return padded / kGroup * kInt4GroupBytes;
    case Format::kQ4_K:
      return padded / kKBlock * Q4_KPanel::kBytes;
    case Format::kQ5_K:
      return padded / kKBlock * Q5_KPanel::kBytes;
    case Format::kQ6_K:
      return padded / kKBlock * Q6_KPanel::kBytes;
  }
  return 0;
}

void check_source(Source source, Source expected) {
  if (source != expected) throw std::invalid_argument("a k-quant takes only rows of its own format");
}

}  // namespace

void widen_row(Source source, const uint8_t* data, int columns, float* out) {
  const int num_blocks = columns / kGroup;
  switch (source) {
    case Source::kFloat32:
      std::memcpy(out, data, columns * sizeof(float));
      break;
    case Source::kBf16:
      for (int i = 0; i < columns; ++i) out[i] = widen(reinterpret_cast<const bf16*>(data)[i]);
      break;
    case Source::kQ4_0:
      for (int b = 0; b < num_blocks; ++b) {
        const auto& block = reinterpret_cast<const Q4_0Block*>(data)[b];
        uint8_t q[kGroup];
        unpack_nibbles(block.nibbles, q);
        for (int i = 0; i < kGroup; ++i) out[b * kGroup + i] = widen_f16(block.scale) * (q[i] - 8);
      }
      break;
    case Source::kQ4_1:
      for (int b = 0; b < num_blocks; ++b) {
        const auto& block = reinterpret_cast<const Q4_1Block*>(data)[b];
        uint8_t q[kGroup];
        unpack_nibbles(block.nibbles, q);
        for (int i = 0; i < kGroup; ++i) {
          out[b * kGroup + i] = widen_f16(block.scale) * q[i] + widen_f16(block.minimum);
        }
      }
      break;
    case Source::kQ8_0:
      for (int b = 0; b < num_blocks; ++b) {
        const auto& block = reinterpret_cast<const Q8_0Block*>(data)[b];
        for (int i = 0; i < kGroup; ++i) out[b * kGroup + i] = widen_f16(block.scale) * block.values[i];
      }
      break;
    case Source::kQ4_K:
      widen_q4_k(data, columns / kKBlock, out);
      break;
    case Source::kQ5_K:
      widen_q5_k(data, columns / kKBlock, out);
      break;
    case Source::kQ6_K:
      widen_q6_k(data, columns / kKBlock, out);
      break;
    case Source::kF16:
      for (int i = 0; i < columns; ++i) out[i] = widen_f16(reinterpret_cast<const f16*>(data)[i]);
      break;
  }
}

Matrix::Matrix(const std::vector<Run>& runs, int columns, uint8_t* packed) : columns(columns) {
  size_t start = 0;
  for (const Run& run : runs) {
    if (rows % kPanel) throw std::invalid_argument("only the last rows of a matrix may fill a part of a panel");
    const int count = (run.rows + kPanel - 1) / kPanel;
    const size_t panel_bytes = bytes_of_panel(run.format, columns);
    sections_.push_back({run.format, rows / kPanel, count, start, panel_bytes});
    if (encoding_of(run.format) != encoding()) throw std::invalid_argument("the formats of a matrix do not mix");
    rows += run.rows;
    start += count * panel_bytes;
  }
  bytes = packed ? Buffer<uint8_t>(packed, num_bytes()) : Buffer<uint8_t>(num_bytes());
}

size_t Matrix::num_bytes() const {
  return sections_.empty() ? 0 : sections_.back().start + sections_.back().num_panels * sections_.back().panel_bytes;
}

bool Matrix::has(Format format) const {
  for (const Section& section : sections_) {
    if (section.format == format) return true;
  }
  return false;
}

Matrix::Panel Matrix::panel(int i) const {
  const Section* section = sections_.data();
  while (i >= section->first_panel + section->num_panels) ++section;
  const size_t at = section->start + (i - section->first_panel) * section->panel_bytes;
  return {section->format, bytes.data() + at, section->panel_bytes};
}

void Matrix::set_row(int row, Source source, const uint8_t* data) {
  const Panel panel = this->panel(row / kPanel);
  auto* at = const_cast<uint8_t*>(panel.bytes);
  const int lane = lane_in_panel(row), padded = padded_columns(), num_blocks = columns / kKBlock;
  switch (panel.format) {
    case Format::kQ4_K:
      check_source(source, Source::kQ4_K);
      return put_q4_k(data, num_blocks, at, lane);
    case Format::kQ5_K:
      check_source(source, Source::kQ5_K);
      return put_q5_k(data, num_blocks, at, lane);
    case Format::kQ6_K:
      check_source(source, Source::kQ6_K);
      return put_q6_k(data, num_blocks, at, lane);
    default:
      break;
  }
  thread_local std::vector<float> w;
  w.assign(padded, 0.f);
  widen_row(source, data, columns, w.data());
  switch (panel.format) {
    case Format::kBf16:
      for (int i = 0; i < padded; ++i) {
        reinterpret_cast<bf16*>(at)[(i / 2 * kPanel + lane) * 2 + i % 2] = narrow(w[i]);
      }
      break;
    case Format::kInt8:
      put_int8(at, lane, w.data(), padded);
      break;
    case Format::kInt8Group:
      for (int g = 0; g < padded / kGroup; ++g) {
        put_group8(at + g * kInt8GroupBytes, lane, read_group8(source, data, w.data(), g));
      }
      break;
    default:
      for (int g = 0; g < padded / kGroup; ++g) {
        put_group4(at + g * kInt4GroupBytes, lane, read_group4(source, data, w.data(), g));
      }
      break;
  }
}

void Matrix::get_row(int row, float* out) const {
  const Panel panel = this->panel(row / kPanel);
  const uint8_t* at = panel.bytes;
  const int lane = lane_in_panel(row), padded = padded_columns(), num_blocks = columns / kKBlock;
  switch (panel.format) {
    case Format::kBf16:
      for (int i = 0; i < columns; ++i) {
        out[i] = widen(reinterpret_cast<const bf16*>(at)[(i / 2 * kPanel + lane) * 2 + i % 2]);
      }
      break;
    case Format::kInt8: {
      const float scale = reinterpret_cast<const float*>(at + (size_t)padded * kPanel)[lane];
      for (int i = 0; i < columns; ++i) out[i] = scale * (at[byte_at(i, lane)] - 128);
      break;
    }
    case Format::kInt8Group:
      for (int i = 0; i < columns; ++i) {
        const uint8_t* group = at + i / kGroup * kInt8GroupBytes;
        const float scale = widen_f16(reinterpret_cast<const f16*>(group)[lane]);
        out[i] = scale * (group[kPanel * sizeof(f16) + byte_at(i % kGroup, lane)] - 128);
      }
      break;
    case Format::kInt4Group:
      for (int i = 0; i < columns; ++i) {
        const uint8_t* group = at + i / kGroup * kInt4GroupBytes;
        const float scale = widen_f16(reinterpret_cast<const f16*>(group)[lane]);
        const float minimum = widen_f16(reinterpret_cast<const f16*>(group)[kPanel + lane]);
        const uint8_t pair = group[2 * kPanel * sizeof(f16) + nibble_at(i % kGroup, lane)];
        out[i] = scale * (i % 8 < 4 ? pair & 15 : pair >> 4) + minimum;
      }
      break;
    case Format::kQ4_K:
      return get_q4_k(at, lane, num_blocks, out);
    case Format::kQ5_K:
      return get_q5_k(at, lane, num_blocks, out);
    case Format::kQ6_K:
      return get_q6_k(at, lane, num_blocks, out);
  }
}

int packed_row(RowLayout layout, int first, int i) {
  if (layout == RowLayout::kPlain) return first + i;
  const int half = layout == RowLayout::kSecondHalf ? kLanes : 0;
  return first + i / kLanes * kPanel + half + i % kLanes;
}

}  // namespace penstock
