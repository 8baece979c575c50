"""Encoders: transformers' own modules on the CPU, and the heads that make vectors and scores of hidden states."""
