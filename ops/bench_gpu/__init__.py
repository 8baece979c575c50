"""One run that measures the GPU runner in at most ten minutes, with nothing but torch, triton and numpy.

    make bench-gpu                    on the GPU; results in build/bench-gpu
    make bench-gpu BENCH=--dry        all of it on the CPU by Triton's interpreter, tiny: its figures mean nothing

Each stage adds to `results.json` when it is done, so a run that is cut short keeps what it has; those behind one that
fails are measured all the same. Weights are random.
"""
