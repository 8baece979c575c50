"""Compiled CPU kernels of penstock. `penstock.kernels.cpu.build` finds the libraries in this folder by their names."""
