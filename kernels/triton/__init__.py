"""The GPU kernels in Triton, each under the name and with the meaning of its reference in `kernels/reference/`.

What changes from step to step is no reason to compile anew: Triton is told not to specialise on it.

They take torch tensors of a CUDA device; under TRITON_INTERPRET=1, set before triton is first imported, Triton's
interpreter runs the same kernels on CPU tensors.
"""
