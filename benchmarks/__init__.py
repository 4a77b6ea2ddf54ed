"""Commands that write benchmarks/results/, `python -m benchmarks.NAME`, or compare builds
(`benchmarks.compare`).

They belong to a checkout. One for each thing that is measured, beside what it is compared with;
README and docs/ quote their files (`benchmarks.tables`), tests draw their `problems`. What anyone
with a wheel measures with is `moelora.bench`, a layer on the machine at hand; the commands here
take cases, shapes, timers and result files from it.
"""
