"""Checks and measures the GPU runner in four stages of at most eight minutes, with torch, triton and numpy alone.

    make bench-gpu                             on the GPU; results in build/bench-gpu
    make bench-gpu BENCH="--stages truth"      one stage; the others are kernels, steps and headline
    make bench-gpu BENCH=--dry                 all of it on the CPU by Triton's interpreter, tiny: times mean nothing

Ceilings are measured first, and each time is compared with one. Each stage writes a JSON file when it is done. A
wrong result ends the run, because its time would mean nothing. Weights are random. See README.md beside this file.
"""

STAGE_S = 450.0
"""A stage's time. Of eight minutes, so that a part that has begun can end."""
