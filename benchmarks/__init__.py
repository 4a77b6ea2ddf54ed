"""Commands that write benchmarks/results/, from a checkout: `python -m benchmarks.NAME`.

One for each thing that is measured, beside what it is compared with; README and docs/ quote their
files (`benchmarks.tables`). `moelora.bench` is what anyone with a wheel measures with, a layer on
the machine at hand, and what the commands here share: cases, shapes, timers, result files.
"""
