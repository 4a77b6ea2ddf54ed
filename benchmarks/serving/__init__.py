"""Servers under load: what an OpenAI-compatible server does with adapters, by `vllm bench serve`.

    python -m benchmarks.serving --model qwen3-30b-a3b --format fp8 --out ...-serving-fp8.json
    python -m benchmarks.serving --engines "vllm + moelora,vllm" --workloads first_minute,load_8
    python -m benchmarks.serving --adapters 16 --max-loras 8 --ranks 16 --workloads adapters,traces
    python -m benchmarks.serving --layers 12 --at-once --out ...-parallel-tensor-2.json \
        --server-args --tensor-parallel-size 2 --kv-cache-memory-bytes 8G
    python -m benchmarks.serving --url http://127.0.0.1:8000 --engines mine --served-model NAME \
        --lora-modules law,code --out mine.json

A server is a row of `engines.json`: a command with its own defaults, and the arguments that turn
adapters on. A load is a row of `workloads.json`, or all of one of its groups. `--more FILE` adds
rows to both. One server runs on the GPU at a time, with empty caches of compilers; it is stopped
before the next one starts. With `--at-once` all are started before the first load, with the caches
that the machine has, share the GPU's memory, which `--server-args` must divide, and take turns in
each load, one at a time. With `--gpus 0,1` those of two engines are up together, each on a GPU of
its own, and are loaded one after the other. A server that did not answer within `--start-s` is
named by a stage. `--url` measures a server that somebody else started.

A model has the configuration of its name at full depth and no weights (`load_format=dummy`), but
experts in four bits are random, since not every byte is a valid scale. Adapters have random factors
for every expert; those of a rank share a file. SGLang reads them by a plugin, `sglang_adapters`.
Sampled tokens are random, so that requests of one batch go to different experts.
"""
