// Products with matrices in k-quants.
#pragma once
#include "gemm/activations.h"

namespace penstock {

// out: [tile.rows][kPanel].
using TileKernel = void (*)(const uint8_t* panel, const Tile& tile, int padded_columns, float* out);

TileKernel k_quant_kernel(Format format, const Tile& tile);

// Many rows are multiplied with an unpacked panel, because unpacking it for each tile would take longer than the
// products. The results are the same to the bit.
constexpr int kTilesToUnpack = 4;

// Bytes of an unpacked panel.
size_t unpacked_bytes(int columns);

// Unpacks a panel of a k-quant. out: aligned to cache lines.
void unpack_k_quant(Format format, const uint8_t* panel, int columns, uint8_t* out);

// The kernel for unpacked panels of a format.
TileKernel unpacked_kernel(Format format, const Tile& tile);

}  // namespace penstock
