"""What can be said of the GPU runner where there is no GPU: its launches, its binaries, the host's part of a step.

    PYTHONPATH=.:ops python -m bench_gpu.without_gpu.launch_counts     launches of decode and mixed steps
    PYTHONPATH=.:ops python -m bench_gpu.without_gpu.host_ceiling      microseconds of `GpuRunner.submit`
    PYTHONPATH=.:ops python -m bench_gpu.without_gpu.estimates         a table of steps

None of these may run with TRITON_INTERPRET=1.
"""
