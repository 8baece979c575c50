// Matrix products: activations [rows, columns] times a packed matrix [outputs, columns], panel by panel.
//
// Every output is one chain of sums over the columns in ascending order, whatever the number of rows. Its bits
// therefore do not depend on the batch.
#pragma once
#include "gemm/activations.h"
#include "gemm/group_kernels.h"
#include "threads/team.h"

namespace penstock {

// The kernel for a tile of at most max_tile_rows(encoding_of(format)) rows.
TileKernel tile_kernel(Format format, const Tile& tile);

// Chooses what a tile prefetches. `index`: its position among the tiles that are multiplied with a panel; the first
// two of these share the next panel.
inline void look_ahead(Tile& tile, int index, int num_tiles, const uint8_t* panel, size_t panel_bytes) {
  const uint8_t *next = panel + panel_bytes, *middle = next + panel_bytes / 2;
  if (num_tiles == 1 && tile.rows <= kMemoryBoundRows) {
    tile.fetch = Fetch::kThisPanel;
  } else if (index < 2) {
    tile.fetch = Fetch::kNextPanel;
    tile.ahead[0] = index == 0 ? next : middle;
    tile.ahead[1] = num_tiles == 1 ? middle : panel;
  }
}

// Rows whose activations stay in the second-level cache while the panels stream through it.
constexpr int kRowsPerPass = 96;

// Copies a row's outputs of a panel. The library's copies would call a function for so few numbers.
inline void copy_panel(const float* outputs, float* row) {
  for (int i = 0; i < kPanel; i += kLanes) store(row + i, load(outputs + i));
}

// Adds the biases of a panel's outputs. out: [rows][kPanel].
inline void add_bias(const float* bias, int rows, float* out) {
  for (int i = 0; i < rows * kPanel; i += kLanes) store(out + i, load(out + i) + load(bias + i % kPanel));
}

// Multiplies the tiles [begin, end), of `num_tiles` that are multiplied with the panel in all; see `multiply`.
template <class Finish>
void multiply_panel(const Activations& left, int begin, int end, int num_tiles, const Matrix& right, int panel,
                    const Finish& finish) {
  thread_local Buffer<uint8_t> packed, unpacked;
  const Matrix::Panel weights = right.read_panel(panel, packed);
  alignas(64) float out[kMaxRows * kPanel];
  const bool unpacks = is_stored(weights.format) && end - begin >= kTilesToUnpack;
  if (unpacks) {
    unpacked.reserve(unpacked_bytes(weights.format, right.padded_columns()));
    unpack_panel(weights.format, weights.bytes, right.padded_columns(), unpacked.data());
  }
  for (int i = begin; i < end; ++i) {
    Tile tile = left.tile(i);
    look_ahead(tile, i - begin, num_tiles, weights.bytes, weights.num_bytes);
    const TileKernel kernel = unpacks ? unpacked_kernel(weights.format, tile) : tile_kernel(weights.format, tile);
    kernel(unpacks ? unpacked.data() : weights.bytes, tile, right.padded_columns(), out);
    if (right.bias.count()) add_bias(&right.bias[panel * kPanel], tile.rows, out);
    finish(left.tiling().first(i), tile.rows, panel, out);
  }
}

// All panels of a matrix.
struct AllPanels {
  int num_panels;

  int count() const { return num_panels; }
  int at(int i) const { return i; }
};

// Computes the outputs of `panels` and passes them to `finish(first_row, num_rows, panel, out)`, out:
// [num_rows][kPanel]. `panels`: has `count()`, and `at(i)` for each of them.
template <class Panels, class Finish>
void multiply(Worker& worker, const Activations& left, const Matrix& right, const Panels& panels,
              const Finish& finish) {
  const int num_tiles = left.tiling().tiles();
  // A panel that is packed on reading is packed once, for all rows.
  const int tiles_per_pass =
      right.is_packed_on_read() ? std::max(1, num_tiles) : std::max(1, kRowsPerPass / max_tile_rows(right.encoding()));
  const int passes = (num_tiles + tiles_per_pass - 1) / tiles_per_pass;
  const int num_panels = panels.count();
  const bool by_panel = worker.spans_nodes();
  worker.for_each(passes * num_panels, [&](int unit) {
    const int pass = by_panel ? unit % passes : unit / num_panels, panel = by_panel ? unit / passes : unit % num_panels;
    const int begin = pass * tiles_per_pass, end = std::min(num_tiles, begin + tiles_per_pass);
    multiply_panel(left, begin, end, num_tiles, right, panels.at(panel), finish);
  });
}

}  // namespace penstock
