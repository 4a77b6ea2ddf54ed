"""Adapters that are added, removed and updated while a model serves: `python -m benchmarks.churn`.

`decoder` is a model with a batch that requests join and leave, `arrivals` generates and schedules
requests, `updates` installs new versions of adapters under load.
"""
