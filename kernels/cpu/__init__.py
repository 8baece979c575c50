"""The CPU kernels: one native call runs a whole step of a decoder, from token ids to sampled tokens.

`src/` is the C++ code; `build` compiles it once into a cache; `probe` finds the instruction set and the number of
usable cores; `library` is the interface for Python. Nothing here knows about engines, checkpoints or torch.
"""
