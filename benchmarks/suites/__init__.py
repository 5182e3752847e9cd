"""The suites, one per file; ``benchmarks/registry.py`` lists them."""
