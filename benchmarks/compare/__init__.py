"""Compares builds, kernel variants and clocks on one machine: `python -m benchmarks.compare`."""
