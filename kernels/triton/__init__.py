"""The GPU kernels in Triton. Each has the name and the meaning of its reference in `kernels/reference/`.

Kernels are not specialized on values that change from step to step: each new value would compile them again.

The functions take torch tensors of a CUDA device. With TRITON_INTERPRET=1, set before triton is first imported,
Triton's interpreter runs the same kernels on CPU tensors.
"""
