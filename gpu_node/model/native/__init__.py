"""The native CPU runner: packs a checkpoint for the kernels of penstock.kernels.cpu and runs steps on them."""
