"""See the package's docstring: `python -m benchmarks.serving --help`."""

import argparse
import json
import os
import pathlib
import shutil
import sys
import time

from benchmarks import ROOT, serving
from benchmarks.engines.jobs import Job, is_up, version, write_entry_points, write_logs
from benchmarks.options import words
from benchmarks.serving import models
from moelora.bench import results

HERE = pathlib.Path(__file__).parent
ENGINES, WORKLOADS = (
    json.loads((HERE / f"{name}.json").read_text()) for name in ("engines", "workloads")
)
# Rows without adapters of an engine that has them: what LoRA costs who does not use it.
WITHOUT_ADAPTERS = ("prefill", "decode_1", "decode_64")
PORT = 8100


def parse(argv=None):
    p = argparse.ArgumentParser(
        description=serving.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=models.MODELS, default="qwen3-30b-a3b")
    p.add_argument("--format", choices=models.QUANTIZED, default="bf16", help="of experts")
    p.add_argument("--layers", type=int, default=0, help="(default: all)")
    p.add_argument("--engines", type=words, default=list(ENGINES)[:3])
    p.add_argument("--workloads", type=words, default=list(WORKLOADS))
    p.add_argument("--url", help="of a running server; its name is that of --engines")
    p.add_argument("--adapters", type=words, default=[], help="of --url")
    p.add_argument("--served-model", help="of --url: the name of its model, a folder or Hub name")
    p.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="more of a server's")
    p.add_argument("--start-s", type=float, default=400, help="until a server answers")
    p.add_argument("--load-s", type=float, default=300, help="of all loads of a server")
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/moelora-serving"))
    p.add_argument("--out", type=pathlib.Path, required=True)
    args = p.parse_args(argv)
    if args.url and (len(args.engines) != 1 or not args.served_model):
        p.error("--url wants one name for --engines and the server's --served-model")
    engines = args.engines if args.url else ENGINES
    for option, names, rows in (
        ("engines", args.engines, engines),
        ("workloads", args.workloads, WORKLOADS),
    ):
        if unknown := [name for name in names if name not in rows]:
            p.error(f"--{option} has {unknown}, {option}.json has {', '.join(rows)}")
    return args


class Bench:
    def __init__(self, args):
        self.args, self.rows, self.stages = args, [], []
        shutil.rmtree(args.work, ignore_errors=True)
        args.work.mkdir(parents=True)

    def made(self):
        """What `models.main` wrote: the folders of the model and of its adapters."""
        command = [sys.executable, "-m", "benchmarks.serving.models", self.args.model]
        command += [self.args.format, self.args.work / "model", self.args.layers]
        self.stages.append(Job("make", command, self.args.work, 180, where=ROOT).wait())
        return json.loads((self.args.work / "model/served.json").read_text())

    def serve(self, name, made):
        """Start a server, run its loads, stop it."""
        engine = ENGINES[name]
        adapters = made["adapters"] if "lora" in engine else {}
        values = {
            "python": [sys.executable],
            "model": [made["base"]],
            "port": [str(PORT)],
            "load": [] if made["weights"] else ["--load-format", "dummy"],
            "count": [str(len(adapters))],
            "rank": [str(max(models.RANKS))],
            "modules": [f"{key}={folder}" for key, folder in adapters.items()],
        }
        command = [*engine["command"], *engine.get("lora", []), *self.args.server_args]
        command = [word for key in command for word in values.get(key.strip("{}"), [key])]
        start = time.monotonic()
        server = Job(
            f"serve {name}",
            command,
            self.args.work,
            self.args.start_s + self.args.load_s,
            self.environment() | self.caches(name) | engine.get("environment", {}),
            where=self.args.work,
        )
        try:
            if not is_up(f"http://127.0.0.1:{PORT}/health", server, self.args.start_s):
                return
            seconds = {"start_s": round(time.monotonic() - start, 1)}
            log = server.log.read_text(errors="replace")
            if (line := engine.get("log")) and line not in log:
                seconds["served"] = "moelora's line is not in the server's log"
            target = {"url": f"http://127.0.0.1:{PORT}", "model": made["base"]}
            self.load(name, target, list(adapters), seconds)
        finally:
            self.stages.append(server.stop("stopped" if server.process.poll() is None else "ended"))

    def load(self, name, target, adapters, fields):
        """Run the loads of one server; rows are there as soon as they are measured."""
        runs = [(w, adapters) for w in self.args.workloads]
        if adapters:
            runs += [(w, []) for w in self.args.workloads if w in WITHOUT_ADAPTERS]
        stem = self.args.work / name.replace(" ", "-")
        job, out = stem.with_suffix(".job.json"), stem.with_suffix(".jsonl")
        workloads = {w: WORKLOADS[w] for w in self.args.workloads}
        target = target | {"tokenizer": target["model"], "workloads": workloads, "runs": runs}
        job.write_text(json.dumps(target))
        command = [sys.executable, "-m", "benchmarks.serving.client", job, out]
        client = Job(f"load {name}", command, self.args.work, self.args.load_s, self.environment())
        self.stages.append(client.wait())
        lines = out.read_text().splitlines() if out.exists() else []
        engine = {"topic": "serving", "engine": name, "lora_enabled": bool(adapters)} | fields
        self.rows += [engine | json.loads(line) for line in lines]

    def environment(self):
        """Servers find the plugin of this checkout as if it was installed."""
        plugin = self.args.work / "plugin"
        if not plugin.exists():
            write_entry_points(plugin)
        path = [ROOT, plugin, os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(str(p) for p in path if str(p))}

    def caches(self, name):
        """Empty folders, so that a server compiles as on a fresh machine."""
        folder = self.args.work / "caches" / name.replace(" ", "-")
        variables = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        return {variable: str(folder / variable.lower()) for variable in variables}

    def write(self):
        fields = {"model": self.args.model, "format": self.args.format, "layers": self.args.layers}
        fields |= {name: version(name) for name in ("vllm", "sglang")}
        settings = {name: ENGINES[name] for name in self.args.engines if name in ENGINES}
        results.write(self.args.out, self.rows, stages=self.stages, **fields, servers=settings)
        write_logs(self.args.work, self.args.out.with_suffix(".log"))


def main(argv=None):
    args = parse(argv)
    results.check_writable("--out", args.out)
    bench = Bench(args)
    if args.url:
        bench.load(
            args.engines[0], {"url": args.url, "model": args.served_model}, args.adapters, {}
        )
        bench.write()
    else:
        made = bench.made()
        for name in args.engines:
            bench.serve(name, made)
            bench.write()
    for row in bench.rows:
        print(*(f"{key} {value}" for key, value in row.items() if key != "topic"), sep=" | ")
    return 0 if all(stage["end"] in ("ok", "stopped") for stage in bench.stages) else 1


if __name__ == "__main__":
    sys.exit(main())
