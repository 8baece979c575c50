"""The GPU kernels in Triton, each under the name and with the meaning of its reference in `kernels/reference/`.

They take torch tensors of a CUDA device; under TRITON_INTERPRET=1, set before triton is first imported, Triton's
interpreter runs the same kernels on CPU tensors.
"""
