"""The benchmark suite: ``python -m benchmarks``, or ``dtensor-bench``."""
