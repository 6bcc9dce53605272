"""Benchmarks: ``bench_ops.py`` (one op), ``bench_prefill.py`` and ``bench_decode.py`` (steps), ``bench_links.py``, ``plot.py``."""
