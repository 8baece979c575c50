"""The runner of a CUDA device: Triton's kernels around torch's matrix products, decode steps as replayed graphs.

On CPU tensors all of it runs by Triton's interpreter, which is how it is tested without a card: streams, events and
graphs are then nothing (`device.py`). But for `load.py` it needs torch, triton and numpy only.
"""
