"""Adapters that come, go and change while a model serves: `python -m benchmarks.churn`."""
