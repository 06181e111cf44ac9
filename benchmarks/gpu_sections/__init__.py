"""The parts of `benchmarks/gpu.py`. Each is run in a process of its own: `run(report, earlier, is_dry_run)`."""
