"""The CPU kernels: one native call runs a whole step of a decoder, from token ids to sampled tokens.

`src/` is the C++; `build` compiles it once into a cache; `probe` says which instruction set and how many cores there
are; `library` is what Python sees of it. Nothing here knows of engines, checkpoints or torch.
"""
