// The left side of a matrix product, in the order in which the dot instructions read it.
//
// Rows are cut into tiles as large as the registers hold. In a tile the rows alternate every 32 columns, so that a kernel
// reads one stream; words are two bf16 or four quantised bytes. Quantisation looks at nothing but its own row: a row's
// product is the same alone and in a batch.
#pragma once
#include "model/weights.h"

namespace penstock {

// Rows that a kernel multiplies with one panel at a time.
constexpr int max_tile_rows(Format format) {
  const bool grouped = format == Format::kInt8Group || format == Format::kInt4Group;
  if (kRegisters >= 32) return grouped ? 6 : 12;
  return grouped ? 2 : 4;
}

// Words of one row that lie together: those of 32 columns.
constexpr int run_words(Format format) { return format == Format::kBf16 ? kGroup / 2 : kGroup / 4; }

// `rows` rows in as few tiles as possible, whose sizes differ by at most one.
struct Tiling {
  int rows, tiles;

  Tiling(int rows, Format format) : rows(rows), tiles((rows + max_tile_rows(format) - 1) / max_tile_rows(format)) {}
  int first(int tile) const { return (int)((int64_t)rows * tile / tiles); }
  int size(int tile) const { return first(tile + 1) - first(tile); }
  int tile_of(int row) const { return (int)(((int64_t)(row + 1) * tiles - 1) / rows); }
};

// What a kernel asks memory for, besides what it reads: a few rows are done as soon as their panel is there, so it is
// asked for a little ahead; more rows leave time to fetch the next panel.
enum class Fetch { kNothing, kThisPanel, kNextPanel };

struct Tile {
  int rows;
  const uint32_t* words;    // [columns / 32][rows][run_words]
  const float* scales;      // [groups][rows]; one group a row for int8
  const int32_t* biases;    // [groups][rows]: -128 * sum of the quantised values, for weights kept as 128 + q
  const float* offsets;     // [groups][rows]: scale * sum
  // What should be fetched while the tile is computed.
  Fetch fetch = Fetch::kNothing;
  const uint8_t* ahead[2] = {nullptr, nullptr};  // for kNextPanel: where two streams of lines begin
};

class Activations {
 public:
  // Room for `rows` rows of `columns` numbers for products with matrices of `format`.
  void prepare(int rows, int columns, Format format);

  // Writes a row: `values` of padded length, of which those past `columns` are zero.
  void set_row(int row, const float* values);

  const Tiling& tiling() const { return tiling_; }
  Tile tile(int i) const;

 private:
  Format format_ = Format::kBf16;
  Tiling tiling_{1, Format::kBf16};
  int padded_ = 0;
  int words_ = 0;
  int groups_ = 0;
  Buffer<uint32_t> data_;
  Buffer<float> scales_;
  Buffer<int32_t> biases_;
  Buffer<float> offsets_;
};

// Quantises `count` values (a multiple of 16) to scale * q with q in [-127, 127]; a NaN or infinity makes the scale NaN.
// Answers the scale, and the sum of q in `sum`.
float quantise_row(const float* values, int count, int8_t* q, int32_t* sum);

// The same for each of `groups` groups of 32; but one value that is not finite makes all scales NaN.
void quantise_groups(const float* values, int groups, int8_t* q, float* scales, int32_t* sums);

}  // namespace penstock
