// Products with matrices in k-quants.
#pragma once
#include "gemm/gemm.h"

namespace penstock {

TileKernel k_quant_kernel(Format format, const Tile& tile);

}  // namespace penstock
