"""Thousands of open streams through one gateway process, read outside Python."""
