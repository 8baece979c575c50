"""Models and their runners: all code that uses torch or weights, and no code that uses Redis or schedules requests.

`protocol.py` is the interface between the engine and a runner; it imports no torch. `options.py` states the runner's
settings.
"""
