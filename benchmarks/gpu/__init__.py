"""The checks of `benchmarks/gpu_check.py`, one function each, and what runs them apart from one another."""
