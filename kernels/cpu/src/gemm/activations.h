// The left side of a matrix product, in the order in which the dot-product instructions read it.
//
// Rows are cut into tiles as large as the registers hold. In a tile the rows alternate every 32 columns, so that a
// kernel reads one stream. A word is two bf16; four quantized values take `kFactorWords` words. Quantization uses only
// its own row, so a row's product is the same alone and in a batch.
#pragma once
#include <algorithm>
#include <vector>

#include "weights/weights.h"

namespace penstock {

// Rows that a kernel multiplies with one panel at a time.
constexpr int max_tile_rows(Encoding encoding) {
  const bool grouped = encoding == Encoding::kByGroup;
  if (kRegisters >= 32) return grouped ? 6 : 12;
  return grouped ? 2 : 4;
}

// Rows that `set_group` writes at once: no kernel has larger tiles.
constexpr int kMaxRows = max_tile_rows(Encoding::kBf16);

// Consecutive words of one row: those of 32 columns.
constexpr int run_words(Encoding encoding) {
  return encoding == Encoding::kBf16 ? kGroup / 2 : kGroup / 4 * kFactorWords;
}

// How rows are cut into tiles. A group of rows has as few tiles as possible, and their sizes differ by at most one.
class Tiling {
 public:
  // Cuts all rows as one group.
  void cut(int rows, Encoding encoding) {
    clear();
    add_group(rows, encoding);
  }
  void clear() { firsts_.assign(1, 0); }
  void reserve(int tiles) { firsts_.reserve(tiles + 1); }
  // Adds rows behind the others, in tiles of their own.
  void add_group(int rows, Encoding encoding) {
    const int begin = firsts_.back(), count = (rows + max_tile_rows(encoding) - 1) / max_tile_rows(encoding);
    for (int i = 1; i <= count; ++i) firsts_.push_back(begin + (int)((int64_t)rows * i / count));
  }
  int tiles() const { return (int)firsts_.size() - 1; }
  int first(int tile) const { return firsts_[tile]; }
  int size(int tile) const { return firsts_[tile + 1] - firsts_[tile]; }
  int tile_of(int row) const {
    return (int)(std::upper_bound(firsts_.begin(), firsts_.end(), row) - firsts_.begin()) - 1;
  }

 private:
  std::vector<int> firsts_{0};  // the first row of each tile, then the number of rows
};

// What a kernel prefetches besides what it reads. A few rows are done as soon as their panel arrives, so they
// prefetch a little ahead in it. More rows leave time to prefetch the next panel.
enum class Fetch { kNothing, kThisPanel, kNextPanel };

// A product with at most this many rows is bound by memory.
constexpr int kMemoryBoundRows = 12;

struct Tile {
  int rows;
  const uint32_t* words;       // [columns / 32][rows][run_words]
  const float* scales;         // [groups][rows]; one group per row for kByRow.
  const int32_t* biases;       // [groups][rows]: -128 * sum of the quantized values, for weights stored as 128 + q.
  const float* offsets;        // [groups][rows]: scale * sum.
  const int32_t* half_biases;  // [2 * groups][rows]: -32 * sum of half a group, for weights stored as 32 + q
  const float* half_offsets;   // [2 * groups][rows]: scale * sum of half a group
  // What to prefetch while the tile is computed.
  Fetch fetch = Fetch::kNothing;
  const uint8_t* ahead[2] = {nullptr, nullptr};  // for kNextPanel: where two streams of cache lines begin
};

class Activations {
 public:
  // Reserves memory for `rows` rows, for products with a matrix.
  void prepare(int rows, const Matrix& right);

  // Writes a row. `values` has the padded length and is zero past `columns`.
  void set_row(int row, const float* values);
  // Writes columns [32 * group, 32 * group + 32) of `count` rows from `first` on, as set_row would. values: [count][32].
  // Not for rows with a single scale, which depends on all columns.
  void set_group(int first, int count, int group, const float* values);

  const Tiling& tiling() const { return tiling_; }
  // The tiling of the prepared rows, for a product with groups of rows. It must be complete before a row is written.
  Tiling& tiling() { return tiling_; }
  Tile tile(int i) const;

 private:
  // Where a row is: its tile, that tile's first row and number of rows, and which of them it is.
  struct Place {
    int tile, first, rows, at;
  };
  Place place_of(int row) const;
  Place place_behind(const Place& place) const;  // of the next row, which must exist
  uint32_t* run_at(const Place& place, int group) const;
  // half_totals: the sums of both halves of the group; they count only for formats that need them.
  void set_scales(const Place& place, int group, float scale, int32_t total, const int32_t* half_totals);

  Encoding encoding_ = Encoding::kBf16;
  bool has_halves_ = false;
  Tiling tiling_;
  int padded_ = 0;
  int words_ = 0;
  int groups_ = 0;
  Buffer<uint32_t> data_;
  Buffer<float> scales_;
  Buffer<int32_t> biases_;
  Buffer<float> offsets_;
  Buffer<int32_t> half_biases_;
  Buffer<float> half_offsets_;
};

// Quantizes `count` values (a multiple of 16) to scale * q with q in [-127, 127]. A NaN or infinity makes the scale
// NaN. Returns the scale, and writes the sum of q to `sum`.
float quantize_row(const float* values, int count, int8_t* q, int32_t* sum);

}  // namespace penstock
