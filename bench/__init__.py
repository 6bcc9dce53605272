"""Benchmarks: ``bench_ops.py`` (one op), ``bench_prefill.py`` (one step of the model), ``plot.py``."""
