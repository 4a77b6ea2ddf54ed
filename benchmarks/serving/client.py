"""Runs loads on servers by `vllm bench serve`, in one process: importing it takes seconds.

    python -m benchmarks.serving.client JOB.json OUT.jsonl

Writes a line of JSON for each load as soon as it is measured.
"""

import argparse
import asyncio
import functools
import json
import pathlib
import sys

METRICS = ("ttft", "tpot", "itl")
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput"),
    *(f"{which}_{metric}_ms" for metric in METRICS for which in ("median", "p99")),
)


OPTIONS = {  # of `vllm bench serve`, by fields of a workload
    "input": "random-input-len",
    "output": "random-output-len",
    "range_ratio": "random-range-ratio",
    "prompts": "num-prompts",
    "rate": "request-rate",
    "burstiness": "burstiness",
    "concurrency": "max-concurrency",
}
FIELDS = {*OPTIONS, "adapters", "zipf", "options", "source"}


def words(target, load, adapters, seed, slo):
    """Arguments of `vllm bench serve`."""
    url, model = target["url"], target["model"]
    arguments = {"base-url": url, "model": model, "tokenizer": model, "dataset-name": "random"}
    arguments["temperature"] = 1  # one after another, tokens of the random model would be the same
    arguments["seed"] = seed  # prompts that were sent before would be found in the prefix cache
    arguments |= {"percentile-metrics": ",".join(METRICS), "metric-percentiles": "99"}
    arguments["ready-check-timeout-sec"] = 0
    arguments |= {name: load[key] for key, name in OPTIONS.items() if key in load}
    arguments |= load.get("options", {})
    flat = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    flat += ["--disable-tqdm", "--goodput", *slo]
    return flat + (["--lora-modules", *modules(load, adapters)] if adapters else [])


def modules(load, adapters):
    """Adapters in turns or, with `zipf`, at random: that number n is asked for 1 / n**zipf as often
    as the first, of 0 all alike, since its name is there so many times."""
    if "zipf" not in load:
        return [*adapters, "--lora-assignment", "round-robin"]
    count, zipf = len(adapters), load["zipf"]
    times = [round(4 * (count / n) ** zipf) for n in range(1, count + 1)]
    named = [name for name, n in zip(adapters, times, strict=True) for _ in range(n)]
    return [*named, "--lora-assignment", "random"]


def measure(serve, target, name, load, adapters, seed, slo):
    """A row: the workload's fields, and what `vllm.benchmarks.serve` found."""
    adapters = adapters[: load.get("adapters")]
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    args = parser.parse_args(words(target, load, adapters, seed, slo))
    found = asyncio.run(serve.main_async(args))
    found = {key: found[key] for key in KEPT if found.get(key) is not None}
    found = {key: round(n, 3) if isinstance(n, float) else n for key, n in found.items()}
    load = {key: value for key, value in load.items() if key not in ("adapters", "source")}
    return {"workload": name, "adapters": len(adapters), "seed": seed} | load | found


def main():
    from vllm.benchmarks import serve

    serve.get_tokenizer = functools.cache(serve.get_tokenizer)  # each load asks for the same
    job, out = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
    with out.open("a") as file:
        for seed, (name, i, adapters) in enumerate(job["runs"]):
            target, load = job["targets"][i], job["workloads"][name]
            row = measure(serve, target, name, load, adapters, seed, job["slo"])
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
