"""See the package's docstring: `python -m benchmarks.serving --help`."""

import argparse
import importlib.util
import json
import pathlib
import sys
import time

from benchmarks import serving
from benchmarks.engines.jobs import WORK, Stages, is_up, show, stem, version
from benchmarks.options import numbers, words
from benchmarks.serving import client, models, sglang_adapters
from moelora.bench import results

HERE = pathlib.Path(__file__).parent
ENGINES, GROUPS = (
    json.loads((HERE / f"{name}.json").read_text()) for name in ("engines", "workloads")
)
# Empty folders, so that a server whose start is timed compiles as on a fresh machine.
CACHES = "VLLM_CACHE_ROOT TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR SGLANG_JIT_CACHE_DIR".split()
# Rows without adapters of an engine that has them: what LoRA costs who does not use it.
WITHOUT_ADAPTERS = ("prefill", "decode_1", "decode_64")


def parse(argv=None):
    p = argparse.ArgumentParser(
        description=serving.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = p.add_argument
    add("--model", choices=models.MODELS, default="qwen3-30b-a3b")
    add("--format", choices=models.QUANTIZED, default="bf16", help="of experts")
    add("--layers", type=int, default=0, help="(default: all)")
    add("--adapters", type=int, default=4, help="that the server has (default: %(default)s)")
    add("--ranks", type=numbers, default=[16, 64], help="of adapters, in turns (default: 16,64)")
    add("--max-loras", type=int, help="adapters on the GPU at once (default: all)")
    add("--max-cpu-loras", type=int, help="in host memory at once (default: the engine's)")
    add("--engines", type=words, default=list(ENGINES)[:3])
    add("--workloads", type=words, default=["engine"], help=f"or of {', '.join(GROUPS)}")
    add("--more", type=pathlib.Path, help='a file of {"engines": {...}, "workloads": {...}}')
    add("--slo", type=words, default=["ttft:500", "tpot:50"], help="ms (default: %(default)s)")
    add("--url", help="of a running server; its name is that of --engines")
    add("--lora-modules", type=words, default=[], help="names of adapters of --url")
    add("--served-model", help="of --url: the name of its model, a folder or Hub name")
    add("--at-once", action="store_true", help="servers are up together, and take turns in loads")
    add("--gpus", type=words, default=[], help="servers are up together, each on one of these")
    add("--only-adapters", action="store_true", help="no loads of servers with adapters without")
    add("--server-args", nargs=argparse.REMAINDER, default=[], help="more of a server's")
    add("--port", type=int, default=8100, help="of the first server (default: %(default)s)")
    add("--start-s", type=float, default=400, help="until a server answers")
    add("--load-s", type=float, default=300, help="of all loads of a server")
    add("--work", type=pathlib.Path, default=pathlib.Path("/tmp/moelora-serving"), help=WORK)
    add("--out", type=pathlib.Path, required=True)
    args = p.parse_args(argv)
    try:
        more = {} | json.loads(args.more.read_text()) if args.more else {}
    except (OSError, ValueError, TypeError) as error:
        p.error(f"--more {args.more}: {error}")
    args.known = ENGINES | more.get("engines", {})
    args.loads = {name: load for group in GROUPS.values() for name, load in group.items()}
    args.loads |= more.get("workloads", {})
    for name, load in args.loads.items():
        if unknown := sorted(load.keys() - client.FIELDS):
            p.error(f"workload {name} has {unknown}, known are {', '.join(sorted(client.FIELDS))}")
    if unready := [name for name, engine in args.known.items() if "command" not in engine]:
        p.error(f"engines {unready} have no command")
    args.workloads = [name for word in args.workloads for name in GROUPS.get(word, [word])]
    if args.url and (len(args.engines) != 1 or not args.served_model):
        p.error("--url wants one name for --engines and the server's --served-model")
    known = {"engines": args.engines if args.url else args.known, "workloads": args.loads}
    for option, rows in known.items():
        if unknown := [name for name in getattr(args, option) if name not in rows]:
            p.error(f"--{option} has {unknown}, known are {', '.join(rows)}")
    if len(set(map(stem, args.engines))) < len(args.engines):
        p.error(f"--engines has {args.engines}, of which two would have the same log")
    pool = {name: getattr(args, name) for name in ("max_loras", "max_cpu_loras")}
    args.pool = {name: size for name, size in pool.items() if size is not None}
    if args.url:
        args.adapters, args.ranks = len(args.lora_modules), None
        return args
    if args.at_once and args.gpus:
        p.error("--at-once has all servers on the same GPUs: leave --gpus out")
    gpt_oss = models.MODELS[args.model][0] is models.GPT_OSS
    if gpt_oss != (args.format == "mxfp4"):
        p.error(f"--format is {args.format}, {args.model} has {'only' if gpt_oss else 'no'} mxfp4")
    args.pool.setdefault("max_loras", args.adapters)
    sizes = [1, args.pool["max_loras"], args.pool.get("max_cpu_loras", args.adapters)]
    if sizes != sorted(sizes) or sizes[1] > args.adapters or min(args.ranks) < 1:
        p.error("wanted 1 <= --max-loras <= --max-cpu-loras, --adapters; and positive --ranks")
    return args


class Bench(Stages):
    def __init__(self, args):
        super().__init__(args, sglang_adapters.ENTRY_POINT)
        self.rows = []

    def made(self):
        """What `models.main` wrote, the folders of the model and of its adapters; None if it
        failed."""
        command = [sys.executable, "-m", "benchmarks.serving.models", self.args.model]
        command += [self.args.format, self.work / "model", self.args.layers]
        command += [",".join(map(str, self.args.ranks)), self.args.adapters]
        self.done(self.job("make", command, 300))
        served = self.work / "model/served.json"
        return json.loads(served.read_text()) if served.exists() else None

    def serve(self, names, made):
        """Start servers, run their loads, stop them."""
        servers, up, late = [], [], f"did not answer within {self.args.start_s:g} s"
        try:
            for i, name in enumerate(names):
                servers.append(self.start(name, made, i, len(names)))
            up += self.up(servers)
            for targets in [up] if self.args.at_once else [[target] for target in up]:
                if targets:
                    self.load(targets)
        finally:
            for server, target in servers:
                end = "stopped" if target["name"] in {fields["name"] for fields in up} else late
                self.stages.append(server.stop(end if server.process.poll() is None else "ended"))
            self.write()

    def start(self, name, made, i, together):
        """Starts server i of those that are up together. Returns it and the target of its loads."""
        engine, port = self.args.known[name], self.args.port + i
        adapters = made["adapters"] if "lora" in engine else {}
        pool = dict(self.args.pool) if adapters else {}
        if "host" not in engine:
            pool.pop("max_cpu_loras", None)
        values = {
            "{python}": [sys.executable],
            "{model}": [made["base"]],
            "{port}": [str(port)],
            "{load}": [] if made["weights"] else ["--load-format", "dummy"],
            "{slots}": [str(pool.get("max_loras"))],
            "{slots+1}": [str(pool.get("max_loras", 0) + 1)],
            "{host}": [str(pool.get("max_cpu_loras"))],
            "{rank}": [str(max(self.args.ranks))],
            "{modules}": [f"{key}={folder}" for key, folder in adapters.items()],
            "{folder}": [str(self.work / "model/adapters")],
        }

        def filled(words):
            return [word for key in words for word in values.get(key, [key])]

        command = [*engine["command"], *engine.get("lora", [])]
        command += engine["host"] if "max_cpu_loras" in pool else []
        command = filled([*command, *self.args.server_args])
        environment, folder = {}, self.work / "caches" / stem(name)
        for cache in () if self.args.at_once else CACHES:
            environment[cache] = str(folder / cache.lower())
        environment |= {"CUDA_VISIBLE_DEVICES": self.args.gpus[i]} if self.args.gpus else {}
        environment |= {k: filled([v])[0] for k, v in engine.get("environment", {}).items()}
        seconds = self.args.start_s + self.args.load_s * together
        server = self.job(f"serve {name}", command, seconds, **environment)
        url = f"http://127.0.0.1:{port}"
        asked = engine.get("adapter", "{adapter}")
        asked = [asked.format(model=made["base"], adapter=key) for key in adapters]
        target = {"name": name, "url": url, "model": made["base"], "adapters": asked}
        return server, target | {"fields": pool}

    def up(self, servers):
        """Targets of servers, as they answer within their time."""
        waiting = list(servers)
        while waiting:
            for server, target in list(waiting):
                seconds = time.monotonic() - server.start
                if is_up(f"{target['url']}/health", server.process, until=0):
                    if not self.args.at_once:
                        target["fields"]["start_s"] = round(seconds, 1)
                    line = self.args.known[target["name"]].get("log", "")
                    if line not in server.log.read_text(errors="replace"):
                        target["fields"]["served"] = "moelora's line is not in the server's log"
                    yield target
                elif server.process.poll() is None and seconds < self.args.start_s:
                    continue
                waiting.remove((server, target))
            time.sleep(0.2)

    def load(self, targets):
        """Run the loads of servers, which take turns in each; rows are there as soon as they are
        measured."""
        numbered = list(enumerate(targets))
        runs = [(w, i, t["adapters"]) for w in self.args.workloads for i, t in numbered]
        without = [] if self.args.only_adapters else WITHOUT_ADAPTERS
        without = [w for w in self.args.workloads if w in without]
        runs += [(w, i, []) for w in without for i, t in numbered if t["adapters"]]
        names = ", ".join(target["name"] for target in targets)
        job, out = (self.work / f"{stem(names)}.{end}" for end in ("job.json", "jsonl"))
        workloads = {w: self.args.loads[w] for w in self.args.workloads}
        asked = {"targets": targets, "workloads": workloads, "runs": runs, "slo": self.args.slo}
        job.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "benchmarks.serving.client", job, out]
        try:
            self.done(self.job(f"load {names}", command, self.args.load_s * len(targets)))
        finally:  # after a signal, too
            lines = out.read_text().splitlines() if out.exists() else []
            for line, (_, i, _) in zip(lines, runs, strict=False):
                target = targets[i]
                engine = {"engine": target["name"], "lora_enabled": bool(target["adapters"])}
                row = {"topic": "serving"} | engine | target["fields"] | json.loads(line)
                self.rows.append(row)

    def write(self):
        names = ("model", "format", "layers", "adapters", "ranks", "slo", "server_args")
        fields = {name: getattr(self.args, name) for name in names}
        fields["arrivals"] = "Poisson, where a row has no burstiness or concurrency"
        fields |= {name: version(name) for name in ("vllm", "sglang", "sgl-deep-gemm")}
        settings = {n: self.args.known[n] for n in self.args.engines if n in self.args.known}
        self.save(self.rows, **fields, servers=settings)


def main(argv=None):
    args = parse(argv)
    if not importlib.util.find_spec("vllm"):
        raise SystemExit("loads come from `vllm bench serve`, and vLLM is not installed here")
    results.check_writable("--out", args.out)
    bench = Bench(args)
    if args.url:
        target = {"name": args.engines[0], "url": args.url, "model": args.served_model}
        bench.load([target | {"adapters": args.lora_modules, "fields": args.pool}])
        bench.write()
    else:
        made = bench.made()
        many = len(args.engines) if args.at_once else len(args.gpus) or 1
        for first in range(0, len(args.engines), many) if made else ():
            bench.serve(args.engines[first : first + many], made)
    show(bench.rows)
    return 0 if all(stage["end"] in ("ok", "stopped") for stage in bench.stages) else 1


if __name__ == "__main__":
    sys.exit(main())
