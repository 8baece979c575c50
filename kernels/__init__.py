"""Compute kernels, one operation under one name in every backend; imports nothing of ours and no model code."""
