"""Compares builds and kernel variants on one machine: `python -m benchmarks.compare`."""
