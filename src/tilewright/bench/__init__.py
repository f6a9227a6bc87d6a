"""Benchmarks: kernels against torch, and models and servers against the machine's limits."""
