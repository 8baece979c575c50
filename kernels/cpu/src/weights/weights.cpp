#include "weights/weights.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

namespace penstock {
namespace {

int lane_in_panel(int row) { return row % kPanel; }

// Rows of a part that are packed into one panel. The first one goes into lane `lane`, and so on.
struct PanelRows {
  const Part& part;
  int begin, end;
  int lane;
};

// Sixteen rows are packed in pieces of about this many bytes of each row. While one piece is packed, the next one is
// prefetched into the L2 cache.
constexpr int kPieceBytes = 4096;

// Puts blocks of a row into lane `lane` of a panel.
template <class P>
void put(P, const uint8_t* blocks, int num_blocks, uint8_t* panel, int lane) {
  for (int b = 0; b < num_blocks; ++b, panel += P::kBytes) {
    const auto& block = reinterpret_cast<const typename P::Block*>(blocks)[b];
    P::Scales::put(block, panel, lane);
    for (int g = 0; g < P::Scales::kGroups; ++g) P::Bits::put(block.codes(g, OneRow()), panel + P::group_at(g), lane);
  }
}

// As above, for a block of sixteen rows, which go into the lanes from `lane` on. offsets: see SixteenRows.
template <class P>
void put(P, const typename P::Block& first, const ptrdiff_t (&offsets)[kLanes], uint8_t* panel, int lane) {
  for (int i = 0; i < kLanes; ++i) {
    const uint8_t* block = reinterpret_cast<const uint8_t*>(&first) + offsets[i];
    P::Scales::put(*reinterpret_cast<const typename P::Block*>(block), panel, lane + i);
  }
  const SixteenRows<typename P::Block> rows(first, offsets);
  for (int g = 0; g < P::Scales::kGroups; ++g) P::Bits::put(first.codes(g, rows), panel + P::group_at(g), lane);
}

template <class P>
void put(P panel_kind, const typename P::Block& block, uint8_t* panel, int lane) {
  put(panel_kind, reinterpret_cast<const uint8_t*>(&block), 1, panel, lane);
}

float lane_of(Floats floats, int lane) {
  float values[kLanes];
  store(values, floats);
  return values[lane];
}

// Writes the weights of a group. `scales`: those of its block, which are in lane `lane`.
template <class P>
void expand(P, const Codes& codes, const uint8_t* scales, int group, int lane, float* out) {
  using Scales = typename P::Scales;
  constexpr int kCount = kGroup / Scales::kParts;
  const int row = lane / kLanes * kLanes;
  for (int part = 0; part < Scales::kParts; ++part, out += kCount) {
    const float scale = lane_of(Scales::scale(scales, group, part, row), lane - row);
    for (int i = 0; i < kCount; ++i) out[i] = scale * P::value(codes[part * kCount + i]);
    if constexpr (Scales::kHasMinima) {
      const float minimum = lane_of(Scales::minimum(scales, group, part, row), lane - row);
      for (int i = 0; i < kCount; ++i) out[i] -= minimum;
    }
  }
}

// Reads a row back from a panel.
template <class P>
void get(P panel_kind, const uint8_t* panel, int lane, int num_blocks, float* out) {
  for (int b = 0; b < num_blocks; ++b, panel += P::kBytes) {
    for (int g = 0; g < P::Scales::kGroups; ++g, out += kGroup) {
      expand(panel_kind, P::Bits::take(panel + P::group_at(g), lane), panel, g, lane, out);
    }
  }
}

template <class P>
void widen(P panel_kind, const uint8_t* blocks, int num_blocks, float* out) {
  alignas(64) uint8_t scales[P::Scales::kBytes] = {};
  for (int b = 0; b < num_blocks; ++b) {
    const auto& block = reinterpret_cast<const typename P::Block*>(blocks)[b];
    P::Scales::put(block, scales, 0);
    for (int g = 0; g < P::Scales::kGroups; ++g, out += kGroup) {
      expand(panel_kind, block.codes(g, OneRow()), scales, g, 0, out);
    }
  }
}

// Rounds x up to an f16, so that the quantized values stay in their range.
f16 scale_at_least(float x) {
  f16 scale = narrow_f16(x);
  return widen_f16(scale) < x ? f16(scale + 1) : scale;
}

struct Range {
  float low, high;
  float poison;  // 0, or NaN if a number is not finite: searching for the largest one does not detect a NaN.

  float largest() const { return std::max(-low, high); }
};

// count: a multiple of 16.
Range range_of(const float* w, int count) {
  Floats high = load(w), low = zeros() - high, poison = zeros();
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = load(w + i);
    high = max(high, x);
    low = max(low, zeros() - x);
    poison = fma(x, zeros(), poison);
  }
  return {-largest(low), largest(high), sum(poison)};
}

Q4_1Block quantize4(const float* w) {
  const Range range = range_of(w, kGroup);
  Q4_1Block block{};
  block.minimum = narrow_f16(range.low + range.poison);
  const float minimum = widen_f16(block.minimum);
  block.scale = scale_at_least(std::max(0.f, range.high - minimum) / 15);
  const float scale = widen_f16(block.scale);
  if (!(scale > 0)) return block;
  uint8_t q[kGroup];
  for (int i = 0; i < kGroup; i += kLanes) {
    const Floats steps = (load(w + i) - broadcast(minimum)) / broadcast(scale);
    store_u8(q + i, to_ints(max(min(steps, broadcast(15.f)), zeros())));
  }
  for (int i = 0; i < kGroup / 2; ++i) block.nibbles[i] = q[i] | q[kGroup / 2 + i] << 4;
  return block;
}

// Writes numbers divided by `scale`, or zeros if the scale is not a positive number. count: a multiple of 16.
void quantize8(const float* w, int count, float scale, int8_t* q) {
  for (int i = 0; i < count; i += kLanes) {
    store_s8(q + i, scale > 0 ? to_ints(load(w + i) / broadcast(scale)) : broadcast_int(0));
  }
}

Q8_0Block quantize8(const float* w) {
  const Range range = range_of(w, kGroup);
  Q8_0Block block{};
  block.scale = scale_at_least(range.largest() / 127 + range.poison);
  quantize8(w, kGroup, widen_f16(block.scale), block.values);
  return block;
}

// w = scale * (q - 8) as scale * q + minimum.
Q4_1Block with_minimum(const Q4_0Block& block) {
  Q4_1Block found{block.scale, narrow_f16(-8 * widen_f16(block.scale)), {}};
  std::copy_n(block.nibbles, sizeof block.nibbles, found.nibbles);
  return found;
}

void put_int8(uint8_t* panel, int lane, const float* w, int padded) {
  const Range range = range_of(w, padded);
  const float scale = range.largest() / 127 + range.poison;
  for (int i = 0; i < padded; i += kGroup, panel += kPanel * kGroup) {
    Q8_0Block block;
    quantize8(w + i, kGroup, scale, block.values);
    Q8_0Panel::Bits::put(block.codes(0, OneRow()), panel, lane);
  }
  reinterpret_cast<float*>(panel)[lane] = scale;
}

// Prefetches bytes from `at` on of sixteen rows, a few at each call. It takes row after row, because the hardware reads
// long runs fastest.
class Ahead {
 public:
  // Takes at most `count` bytes of each row, from row `row` of the part on.
  Ahead(const Part& part, int row, size_t at, size_t count)
      : part_(part), row_(row), end_(std::min(part.count, row + kLanes)), at_(at), count_(count) {}

  void fetch(size_t count) {
    for (size_t i = 0; i < count && row_ < end_; i += kLine) {
      _mm_prefetch(reinterpret_cast<const char*>(part_.row(row_) + at_ + done_), _MM_HINT_T1);
      done_ += kLine;
      if (done_ < count_) continue;
      done_ = 0;
      ++row_;
    }
  }

 private:
  const Part& part_;
  int row_;
  const int end_;
  const size_t at_, count_;
  size_t done_ = 0;  // bytes of this row
};

// Packs sixteen rows of a part, from row `row` on, and prefetches the bytes that are packed next. Calls
// `put(first, offsets, i)` for each block i: its place in the first row, and the distances of the other rows from it.
template <class Block, class Put>
void put_sixteen(const Part& part, int row, int num_blocks, const Put& put) {
  constexpr int kPiece = std::max<int>(1, kPieceBytes / sizeof(Block));
  ptrdiff_t offsets[kLanes];
  for (int i = 0; i < kLanes; ++i) offsets[i] = part.row(row + i) - part.row(row);
  const auto* blocks = reinterpret_cast<const Block*>(part.row(row));
  for (int begin = 0; begin < num_blocks; begin += kPiece) {
    const int end = std::min(num_blocks, begin + kPiece), next = end < num_blocks ? end : 0;
    const int next_count = std::min(kPiece, num_blocks - next);
    Ahead ahead(part, next ? row : row + kLanes, next * sizeof(Block), next_count * sizeof(Block));
    for (int i = begin; i < end; ++i) {
      ahead.fetch(kLanes * sizeof(Block));
      put(blocks[i], offsets, i);
    }
  }
}

// Puts the blocks of rows into a panel: of sixteen rows at a time, then of each row that is left.
template <class P>
void put_rows(P kind, const PanelRows& rows, int num_blocks, uint8_t* panel) {
  int row = rows.begin, lane = rows.lane;
  for (; row + kLanes <= rows.end; row += kLanes, lane += kLanes) {
    put_sixteen<typename P::Block>(rows.part, row, num_blocks, [&](const auto& first, const auto& offsets, int i) {
      put(kind, first, offsets, panel + (size_t)i * P::kBytes, lane);
    });
  }
  for (; row < rows.end; ++row, ++lane) put(kind, rows.part.row(row), num_blocks, panel, lane);
}

// columns: an even number.
void put_bf16(uint8_t* panel, int lane, const uint8_t* row, int columns) {
  for (int i = 0; i < columns; i += 2, panel += kPanel * 2 * sizeof(bf16)) {
    std::memcpy(panel + lane * 2 * sizeof(bf16), row + i * sizeof(bf16), 2 * sizeof(bf16));
  }
}

void put_bf16(uint8_t* panel, int lane, const std::vector<bf16>& row) {
  put_bf16(panel, lane, reinterpret_cast<const uint8_t*>(row.data()), (int)row.size());
}

// As put_rows, for rows of bf16. columns: a multiple of 32.
void put_bf16_rows(const PanelRows& rows, int columns, uint8_t* panel) {
  struct Block {
    uint8_t bytes[kGroup * sizeof(bf16)];
  };
  int row = rows.begin, lane = rows.lane;
  for (; row + kLanes <= rows.end; row += kLanes, lane += kLanes) {
    put_sixteen<Block>(rows.part, row, columns / kGroup, [&](const Block& first, const auto& offsets, int block) {
      uint8_t* at = panel + block * kPanel * sizeof(Block) + lane * 4;
      for (int i = 0; i < kGroup / 2; i += 4) {
        Ints pairs[4];
        load_words(first.bytes + i * 4, offsets, pairs);
        for (int k = 0; k < 4; ++k) store_word(at + (i + k) * kPanel * 4, pairs[k]);
      }
    });
  }
  for (; row < rows.end; ++row, ++lane) put_bf16(panel, lane, rows.part.row(row), columns);
}

// Returns the bytes of a panel with that many columns.
size_t bytes_of_panel(Format format, int columns) {
  const size_t padded = round_up(columns, kGroup);
  if (format == Format::kBf16) return padded * kPanel * sizeof(bf16);
  if (format == Format::kInt8) return padded * kPanel + kPanel * sizeof(float);
  return with_panel(format, [&]<class P>(P) {
    if (is_stored(format) && columns % P::kColumns)
      throw std::invalid_argument("the columns do not fill GGUF's blocks");
    return padded / P::kColumns * P::kBytes;
  });
}

struct RowRange {
  int begin, end;
};

// Returns which rows of a part are in a panel of its matrix.
RowRange rows_in_panel(const Part& part, int panel) {
  const bool is_plain = part.layout == RowLayout::kPlain;
  const int begin = is_plain ? panel * kPanel - part.first : (panel - part.first / kPanel) * kLanes;
  return {std::max(0, begin), std::min(part.count, begin + (is_plain ? kPanel : kLanes))};
}

size_t byte_at(int column, int lane) { return (column / 4 * kPanel + lane) * 4 + column % 4; }

}  // namespace

PanelRange panels_of(const Part& part) {
  const int begin = part.first / kPanel;
  return {begin, part.count ? packed_row(part.layout, part.first, part.count - 1) / kPanel + 1 : begin};
}

Format lossless_format(Source source) {
  switch (source) {
    case Source::kQ8_0:
      return Format::kInt8Group;
    case Source::kQ4_1:
      return Format::kInt4Group;
    case Source::kQ4_0:
      return Format::kQ4_0;
    case Source::kQ5_0:
      return Format::kQ5_0;
    case Source::kQ5_1:
      return Format::kQ5_1;
    case Source::kQ2_K:
      return Format::kQ2_K;
    case Source::kQ3_K:
      return Format::kQ3_K;
    case Source::kQ4_K:
      return Format::kQ4_K;
    case Source::kQ5_K:
      return Format::kQ5_K;
    case Source::kQ6_K:
      return Format::kQ6_K;
    case Source::kIQ4_NL:
      return Format::kIQ4_NL;
    case Source::kIQ4_XS:
      return Format::kIQ4_XS;
    case Source::kMXFP4:
      return Format::kMXFP4;
    default:
      return Format::kBf16;
  }
}

void widen_row(Source source, const uint8_t* data, int columns, float* out) {
  switch (source) {
    case Source::kFloat32:
      std::memcpy(out, data, columns * sizeof(float));
      break;
    case Source::kBf16:
      for (int i = 0; i < columns; ++i) out[i] = widen(reinterpret_cast<const bf16*>(data)[i]);
      break;
    case Source::kF16:
      for (int i = 0; i < columns; ++i) out[i] = widen_f16(reinterpret_cast<const f16*>(data)[i]);
      break;
    default:
      with_panel(lossless_format(source), [&]<class P>(P panel) { widen(panel, data, columns / P::kColumns, out); });
  }
}

Matrix::Matrix(const std::vector<Run>& runs, int columns, bool is_packed_on_read)
    : columns(columns), is_packed_on_read_(is_packed_on_read) {
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
}

Matrix::Matrix(const std::vector<Run>& runs, int columns, uint8_t* packed) : Matrix(runs, columns, false) {
  bytes = packed ? Buffer<uint8_t>(packed, num_bytes()) : Buffer<uint8_t>(num_bytes());
}

Matrix Matrix::packed_on_read(const std::vector<Run>& runs, int columns) { return Matrix(runs, columns, true); }

size_t Matrix::num_bytes() const {
  return sections_.empty() ? 0 : sections_.back().start + sections_.back().num_panels * sections_.back().panel_bytes;
}

bool Matrix::has(Format format) const {
  for (const Section& section : sections_) {
    if (section.format == format) return true;
  }
  return false;
}

const Matrix::Section& Matrix::section_of(int panel) const {
  const Section* section = sections_.data();
  while (panel >= section->first_panel + section->num_panels) ++section;
  return *section;
}

Matrix::Panel Matrix::panel(int i) const {
  const Section& section = section_of(i);
  const size_t at = section.start + (i - section.first_panel) * section.panel_bytes;
  return {section.format, bytes.data() + at, section.panel_bytes};
}

Matrix::Panel Matrix::read_panel(int i, Buffer<uint8_t>& scratch) const {
  if (!is_packed_on_read_) return panel(i);
  const Section& section = section_of(i);
  scratch.reserve(section.panel_bytes);
  if ((i + 1) * kPanel > rows) std::memset(scratch.data(), 0, section.panel_bytes);  // the padding
  for (const Part& part : parts_) pack_rows(section.format, scratch.data(), i, part);
  return {section.format, scratch.data(), section.panel_bytes};
}

void Matrix::add_part(const Part& part) {
  for (int i = 0; i < part.count; ++i) {
    const int panel = packed_row(part.layout, part.first, i) / kPanel;
    if (section_of(panel).format != lossless_format(part.source)) {
      throw std::invalid_argument("rows that are packed on reading need a matrix of their own format");
    }
  }
  parts_.push_back(part);
}

void Matrix::set_row(int row, Source source, const uint8_t* data) {
  const Panel panel = this->panel(row / kPanel);
  pack_row(panel.format, const_cast<uint8_t*>(panel.bytes), lane_in_panel(row), source, data);
}

void Matrix::set_rows(int i, const Part& part) {
  const Panel panel = this->panel(i);
  pack_rows(panel.format, const_cast<uint8_t*>(panel.bytes), i, part);
}

void Matrix::pack_rows(Format format, uint8_t* panel, int i, const Part& part) const {
  const auto [begin, end] = rows_in_panel(part, i);
  if (begin >= end) return;
  const PanelRows rows{part, begin, end, lane_in_panel(packed_row(part.layout, part.first, begin))};
  const bool keeps_blocks = lossless_format(part.source) == format && format != Format::kBf16;
  if (keeps_blocks) {
    with_panel(format, [&]<class P>(P kind) { put_rows(kind, rows, columns / P::kColumns, panel); });
  } else if (format == Format::kBf16 && part.source == Source::kBf16 && columns == padded_columns()) {
    put_bf16_rows(rows, columns, panel);
  } else {
    for (int k = 0; k < end - begin; ++k) pack_row(format, panel, rows.lane + k, part.source, part.row(begin + k));
  }
}

void Matrix::pack_row(Format format, uint8_t* at, int lane, Source source, const uint8_t* data) const {
  const int padded = padded_columns();
  const Format own = lossless_format(source);
  thread_local std::vector<bf16> narrow_row;
  if (own == format && own != Format::kBf16) {
    return with_panel(own, [&]<class P>(P kind) { put(kind, data, columns / P::kColumns, at, lane); });
  }
  if (is_stored(format)) throw std::invalid_argument("a format of GGUF takes only rows that are stored in it");
  narrow_row.assign(padded, 0);
  if (format == Format::kBf16 && source == Source::kBf16) {
    std::memcpy(narrow_row.data(), data, columns * sizeof(bf16));
    return put_bf16(at, lane, narrow_row);
  }
  thread_local std::vector<float> w;
  w.assign(padded, 0.f);
  widen_row(source, data, columns, w.data());
  switch (format) {
    case Format::kBf16:
      for (int i = 0; i < padded; ++i) narrow_row[i] = narrow(w[i]);
      put_bf16(at, lane, narrow_row);
      break;
    case Format::kInt8:
      put_int8(at, lane, w.data(), padded);
      break;
    case Format::kInt8Group:
      for (int i = 0; i < padded; i += kGroup, at += Q8_0Panel::kBytes) put(Q8_0Panel(), quantize8(&w[i]), at, lane);
      break;
    default:
      for (int i = 0; i < padded; i += kGroup, at += Q4_1Panel::kBytes) {
        const auto* blocks = reinterpret_cast<const Q4_0Block*>(data);
        put(Q4_1Panel(), source == Source::kQ4_0 ? with_minimum(blocks[i / kGroup]) : quantize4(&w[i]), at, lane);
      }
  }
}

void Matrix::get_row(int row, float* out) const {
  thread_local Buffer<uint8_t> scratch;
  const Panel panel = read_panel(row / kPanel, scratch);
  const uint8_t* at = panel.bytes;
  const int lane = lane_in_panel(row), padded = padded_columns();
  if (panel.format == Format::kBf16) {
    const auto* numbers = reinterpret_cast<const bf16*>(at);
    for (int i = 0; i < columns; ++i) out[i] = widen(numbers[(i / 2 * kPanel + lane) * 2 + i % 2]);
  } else if (panel.format == Format::kInt8) {
    const float scale = reinterpret_cast<const float*>(at + (size_t)padded * kPanel)[lane];
    for (int i = 0; i < columns; ++i) out[i] = scale * (at[byte_at(i, lane)] - 128);
  } else {
    with_panel(panel.format, [&]<class P>(P kind) {
      thread_local std::vector<float> values;
      values.resize(padded);
      get(kind, at, lane, padded / P::kColumns, values.data());
      std::copy_n(values.data(), columns, out);
    });
  }
}

int packed_row(RowLayout layout, int first, int i) {
  if (layout == RowLayout::kPlain) return first + i;
  const int half = layout == RowLayout::kSecondHalf ? kLanes : 0;
  return first + i / kLanes * kPanel + half + i % kLanes;
}

}  // namespace penstock
