"""Compute kernels: each operation has the same name in every backend. Imports no other package of penstock."""
