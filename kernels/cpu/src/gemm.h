// Matrix products: activations [rows, columns] times a packed matrix [outputs, columns], panel by panel.
//
// Every output is one chain of sums over the columns in ascending order, whatever the number of rows: its bits do not
// depend on the batch.
#pragma once
#include "activations.h"
#include "team.h"

namespace penstock {

// out: [tile.rows][kPanel].
using TileKernel = void (*)(const uint8_t* panel, const Tile& tile, int padded_columns, float* out);

// The kernel for tiles of `rows` rows; 1 <= rows <= max_tile_rows(format).
TileKernel tile_kernel(Format format, int rows);

// Rows whose activations stay in the second-level cache while panels pass by.
constexpr int kRowsPerPass = 96;

// Computes all outputs and hands them to `finish(first_row, num_rows, panel, out)`, out: [num_rows][kPanel].
template <class Finish>
void multiply(Member& member, const Activations& left, const Matrix& right, const Finish& finish) {
  const Tiling& tiling = left.tiling();
  const int tiles_per_pass = std::max(1, kRowsPerPass / max_tile_rows(right.format));
  const int passes = (tiling.tiles + tiles_per_pass - 1) / tiles_per_pass;
  const int num_panels = right.num_panels();
  member.for_each(passes * num_panels, [&](int unit) {
    const int pass = unit / num_panels, panel = unit % num_panels;
    alignas(64) float out[max_tile_rows(Format::kBf16) * kPanel];
    const int end = std::min(tiling.tiles, (pass + 1) * tiles_per_pass);
    for (int i = pass * tiles_per_pass; i < end; ++i) {
      const Tile tile = left.tile(i);
      tile_kernel(right.format, tile.rows)(right.panel(panel), tile, right.padded_columns(), out);
      finish(tiling.first(i), tile.rows, panel, out);
    }
  });
}

}  // namespace penstock
