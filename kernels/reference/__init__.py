"""Naive references that say what each operation means; every faster kernel is tested against them."""
