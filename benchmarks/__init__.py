"""Benchmarks: one script a question, dated results in `results/`."""
