"""The GPU runner: Triton kernels around torch's matrix products, with steps replayed as CUDA graphs.

Without a GPU, Triton's interpreter runs the kernels on CPU tensors, which is how tests run them. Streams, events and
graphs then do nothing (`device.py`). All modules except `load.py` need only torch, triton and numpy.
"""
