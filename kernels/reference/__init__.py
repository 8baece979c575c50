"""Naive references that define each operation; every faster kernel is tested against them."""
