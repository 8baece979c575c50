// Weight matrices in the order in which the dot instructions read them.
//
// A matrix [rows, columns] is cut into panels of 32 rows (output features). A panel is one contiguous stream:
//
//   bf16           [columns / 2][32 rows][2] bf16
//   int8           [columns / 4][32 rows][4] u8, then 32 float scales;     w = scale * (u8 - 128)
//   int8_group     per 32 columns: 32 f16 scales, [8][32 rows][4] u8;      w = scale * (u8 - 128)      (GGUF's Q8_0)
//   int4_group     per 32 columns: 32 f16 scales, 32 f16 minima, [4][32 rows][4] nibble pairs;
//                  w = scale * nibble + minimum                            (GGUF's Q4_1; Q4_0 with minimum = -8 scale)
//
// A nibble pair holds column c in its low and column c + 4 in its high half. Rows are padded to panels and columns to 32
// with weights of zero.
#pragma once
#include "threads/memory.h"
#include "simd/simd.h"

namespace penstock {

constexpr int kPanel = 32;
constexpr int kGroup = 32;

enum class Format : int { kBf16 = 0, kInt8 = 1, kInt8Group = 2, kInt4Group = 3 };
constexpr int kNumFormats = 4;

// How rows come in: plain numbers, or GGUF's blocks of 32 or 256.
enum class Source : int { kFloat32 = 0, kBf16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4, kQ4_K = 5, kQ5_K = 6, kQ6_K = 7, kF16 = 8 };

// Where the rows of a part go in a fused matrix: one after the other, or in halves of a panel so that row i of one part
// and row i of the other lie 16 apart.
enum class Place : int { kPlain = 0, kFirstHalf = 1, kSecondHalf = 2 };

struct Matrix {
  Format format = Format::kBf16;
  int rows = 0;
  int columns = 0;
  Buffer<uint8_t> bytes;
  Buffer<float> bias;  // of padded rows, or empty

  Matrix() = default;
  // Of zeros; or, with `packed`, of num_bytes() that were packed before and that somebody else keeps.
  Matrix(Format format, int rows, int columns, uint8_t* packed = nullptr);

  int padded_columns() const { return round_up(columns, kGroup); }
  int num_panels() const { return (rows + kPanel - 1) / kPanel; }
  size_t panel_bytes() const;
  size_t num_bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(int i) const { return bytes.data() + i * panel_bytes(); }

  // Packs source row `data` of `columns` numbers as row `row`. Reads only numbers that are there.
  void set_row(int row, Source source, const uint8_t* data);
  // The row as the kernels see it, without padding.
  void get_row(int row, float* out) const;
};

int place_row(Place place, int first, int i);

// A source row of `columns` numbers as plain ones.
void widen_row(Source source, const uint8_t* data, int columns, float* out);

}  // namespace penstock
