// Weight matrices, packed in the order in which the dot-product instructions read them.
//
// A matrix [rows, columns] is cut into panels of 32 rows (output features). A panel is one contiguous stream:
//
//   bf16           [columns / 2][32 rows][2] bf16
//   int8           [columns / 4][32 rows][4] u8, then 32 float scales;     w = scale * (u8 - 128)
//   int8_group     GGUF's Q8_0, and int4_group: its Q4_1, see panels.h. They also hold rows of other formats, quantized.
//   All others     GGUF's blocks, see panels.h. They hold only rows of their own format.
//
// The parts of a fused matrix may have different formats, each with whole panels. Rows are padded to whole panels and
// columns to multiples of 32, with zero weights.
#pragma once
#include <vector>

#include "threads/memory.h"
#include "weights/panels.h"

namespace penstock {

enum class Format : int {
  kBf16 = 0,
  kInt8 = 1,
  kInt8Group = 2,
  kInt4Group = 3,
  kQ4_K = 4,
  kQ5_K = 5,
  kQ6_K = 6,
  kQ2_K = 7,
  kQ3_K = 8,
  kIQ4_NL = 9,
  kIQ4_XS = 10,
  kQ4_0 = 11,
  kQ5_0 = 12,
  kQ5_1 = 13,
  kMXFP4 = 14
};

// Whether a format holds only rows that are stored in it.
constexpr bool is_stored(Format format) { return format >= Format::kQ4_K; }

// Calls `use(P())` with the panel P of a format with scales for groups.
template <class Use>
decltype(auto) with_panel(Format format, const Use& use) {
  switch (format) {
    case Format::kInt8Group:
      return use(Q8_0Panel());
    case Format::kInt4Group:
      return use(Q4_1Panel());
    case Format::kQ4_0:
      return use(Q4_0Panel());
    case Format::kQ5_0:
      return use(Q5_0Panel());
    case Format::kQ5_1:
      return use(Q5_1Panel());
    case Format::kQ2_K:
      return use(Q2_KPanel());
    case Format::kQ3_K:
      return use(Q3_KPanel());
    case Format::kQ4_K:
      return use(Q4_KPanel());
    case Format::kQ5_K:
      return use(Q5_KPanel());
    case Format::kQ6_K:
      return use(Q6_KPanel());
    case Format::kIQ4_NL:
      return use(IQ4_NLPanel());
    case Format::kMXFP4:
      return use(MXFP4Panel());
    default:
      return use(IQ4_XSPanel());
  }
}

// How the other side of a product is encoded: bf16; bytes with one scale per row; bytes with a scale per 32 columns.
enum class Encoding : int { kBf16 = 0, kByRow = 1, kByGroup = 2 };
constexpr int kNumEncodings = 3;

constexpr Encoding encoding_of(Format format) {
  if (format == Format::kBf16) return Encoding::kBf16;
  return format == Format::kInt8 ? Encoding::kByRow : Encoding::kByGroup;
}

// Format of a checkpoint's rows: plain numbers, or GGUF's blocks of 32 or 256 weights.
enum class Source : int {
  kFloat32 = 0,
  kBf16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 4,
  kQ4_K = 5,
  kQ5_K = 6,
  kQ6_K = 7,
  kF16 = 8,
  kQ2_K = 9,
  kQ3_K = 10,
  kIQ4_NL = 11,
  kIQ4_XS = 12,
  kQ5_0 = 13,
  kQ5_1 = 14,
  kMXFP4 = 15
};

// The format that keeps rows of a source to the bit.
Format lossless_format(Source source);

// Where the rows of a part go in a fused matrix: one after the other, or into one half of each panel. With halves,
// row i of one part and row i of the other are 16 rows apart.
enum class RowLayout : int { kPlain = 0, kFirstHalf = 1, kSecondHalf = 2 };

// Consecutive rows of one format.
struct Run {
  Format format;
  int rows;
};

// Returns the matrix row of row i of a part; `first` is the matrix row of its row 0.
int packed_row(RowLayout layout, int first, int i);

// `count` rows of a checkpoint, of `row_bytes` each, which become the rows of a matrix from `first` on. `order`: the
// source row of each, or null.
struct Part {
  Source source;
  RowLayout layout;
  int first, count;
  const uint8_t* data;
  size_t row_bytes;
  const int32_t* order;

  const uint8_t* row(int i) const { return data + (order ? order[i] : i) * row_bytes; }
};

// Panels of a matrix from `begin` to before `end`.
struct PanelRange {
  int begin, end;
};

// Returns the panels that have rows of a part.
PanelRange panels_of(const Part& part);

struct Matrix {
  int rows = 0;
  int columns = 0;
  Buffer<uint8_t> bytes;
  Buffer<float> bias;  // one per padded row, or empty

  Matrix() = default;
  // Creates a matrix of zeros. Every run but the last has whole panels, and all formats have the same encoding. With
  // `packed`, borrows num_bytes() bytes that were packed before, which the caller must keep alive. Throws
  // std::invalid_argument.
  Matrix(const std::vector<Run>& runs, int columns, uint8_t* packed = nullptr);
  // Creates a matrix that has no bytes of its own: `read_panel` packs a panel from the parts that `add_part` names. So
  // a model can be used before its weights are packed. Throws as the constructor does.
  static Matrix packed_on_read(const std::vector<Run>& runs, int columns);

  int padded_columns() const { return round_up(columns, kGroup); }
  int num_panels() const { return (rows + kPanel - 1) / kPanel; }
  size_t num_bytes() const;
  Encoding encoding() const { return sections_.empty() ? Encoding::kBf16 : encoding_of(sections_[0].format); }
  bool has(Format format) const;

  struct Panel {
    Format format;
    const uint8_t* bytes;
    size_t num_bytes;
  };
  // Returns a panel of a matrix that has bytes.
  Panel panel(int i) const;
  // Returns a panel of any matrix. A panel that is packed on reading is in `scratch`, until its next use.
  Panel read_panel(int i, Buffer<uint8_t>& scratch) const;
  bool is_packed_on_read() const { return is_packed_on_read_; }
  // Remembers rows that are packed on reading. The caller keeps them and their order. Throws std::invalid_argument if
  // the matrix would not keep the rows to the bit.
  void add_part(const Part& part);

  // Packs source row `data` of `columns` numbers as row `row`, which must not be packed yet. Never reads past the end
  // of the source row. Throws std::invalid_argument if the format does not hold rows of that source.
  void set_row(int row, Source source, const uint8_t* data);
  // Packs the rows of a part that are in panel `i`, as `set_row` does.
  void set_rows(int i, const Part& part);
  // Writes a row as the kernels see it, dequantized and without padding.
  void get_row(int row, float* out) const;

 private:
  // Panels of one format; the first one is at byte `start`.
  struct Section {
    Format format;
    int first_panel, num_panels;
    size_t start, panel_bytes;
  };
  Matrix(const std::vector<Run>& runs, int columns, bool is_packed_on_read);
  const Section& section_of(int panel) const;
  void pack_rows(Format format, uint8_t* panel, int i, const Part& part) const;
  void pack_row(Format format, uint8_t* panel, int lane, Source source, const uint8_t* data) const;

  std::vector<Section> sections_;
  bool is_packed_on_read_ = false;
  std::vector<Part> parts_;
};

// Converts a source row of `columns` numbers to floats.
void widen_row(Source source, const uint8_t* data, int columns, float* out);

}  // namespace penstock
