// Products with matrices that have scales for groups of columns.
#pragma once
#include "gemm/tile_kernels.h"

namespace penstock {

TileKernel group_kernel(Format format, const Tile& tile);

// Many rows are multiplied with an unpacked panel, because unpacking it for each tile would take longer than the
// products. The results are the same to the bit.
constexpr int kTilesToUnpack = 4;

// Bytes of an unpacked panel.
size_t unpacked_bytes(Format format, int columns);

// Unpacks a panel of a stored format. out: aligned to cache lines.
void unpack_panel(Format format, const uint8_t* panel, int columns, uint8_t* out);

// The kernel for unpacked panels of a format.
TileKernel unpacked_kernel(Format format, const Tile& tile);

}  // namespace penstock
