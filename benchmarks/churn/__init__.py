"""Adapters that come, go and change while a model serves: `python -m benchmarks.churn`.

`decoder` is a model with a batch that requests join and leave, `arrivals` the requests and who is
served next, `updates` new versions under load.
"""
