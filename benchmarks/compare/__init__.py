"""Compares builds, and settings of one, on one machine: `python -m benchmarks.compare`."""
