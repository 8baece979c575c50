"""The native CPU runner: a checkpoint packed for the kernels of penstock.kernels.cpu, and steps of it."""
