"""Servers under load: what an OpenAI-compatible server does with adapters, by `vllm bench serve`.

docs/serving-benchmark.md has commands, engines and loads. A server is a row of `engines.json`, a
load one of `workloads.json`, or all of one of its groups; `--more FILE` adds rows to both. One
server runs on the GPU at a time, with empty caches of compilers. With `--at-once` all are started
before the first load, with the caches that the machine has, share the GPU's memory, which
`--server-args` must divide, and take turns in each load. With `--gpus 0,1` those of two engines are
up together, each on a GPU of its own, and are loaded one after the other.

A model has the configuration of its name at full depth and no weights (`load_format=dummy`), but
experts in four bits are random, since not every byte is a valid scale. Adapters have random factors
for every expert; those of a rank share a file. SGLang reads them by a plugin, `sglang_adapters`.
Sampled tokens are random, so that requests of one batch go to different experts.
"""
