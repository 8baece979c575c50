"""Models and their runners: everything that touches torch or weights, and nothing that touches Redis or scheduling.

`protocol.py` is what the engine sees of a runner; it imports no torch.
"""
