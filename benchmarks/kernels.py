"""What each kernel of a layer does with the GPU, as Nsight Compute counts it.

    python -m benchmarks.kernels --out benchmarks/results/h200-kernels.json
    python -m benchmarks.kernels --cases qwen3:4096:16,mixtral:256:0,mixtral@int4:16:0

A case is model:tokens:rank or model@format:tokens:rank, with 8 adapters unless the rank is 0.
Kernels run one by one here, with a cold L2 before the first: their times add up to more than a
layer in a graph takes, where each starts beside its forerunner. `wgmma_issue_percent` counts wgmma
instructions against the issue rate, not their cycles; `tensor_percent` counts cycles. Needs `ncu`
and the right to read the GPU's counters.
"""

import argparse
import csv
import os
import re
import subprocess
import sys

import torch

from moelora.bench import cases, results
from moelora.bench.baselines.ours import Ours
from moelora.bench.layer import Layer
from moelora.bench.shapes import find

CASES = (
    "qwen3:16:16,qwen3:256:0,qwen3:256:16,qwen3:4096:0,qwen3:4096:16,qwen3:4096:64,"
    "mixtral:1024:16,mixtral:4096:16,dsv2lite:4096:16"
)
METRICS = {
    "gpu__time_duration.sum": "us",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "wgmma_issue_percent",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor_percent",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "alu_percent",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "fma_percent",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "lsu_percent",
    "dram__bytes_read.sum": "dram_read_mb",
    "dram__bytes_write.sum": "dram_write_mb",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__cycles_active.avg": "cycles",
}
STALLS = (
    "barrier",
    "drain",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SCALE = {"us": 1e-3, "dram_read_mb": 1e-6, "dram_write_mb": 1e-6}
INSIDE = "MOELORA_UNDER_NCU"


def run(wanted):
    """Run each case once under ncu, between cudaProfilerStart and cudaProfilerStop."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for name in dict.fromkeys(model for model, _, _ in wanted):
        generator = torch.Generator("cuda").manual_seed(0)
        ranks = sorted({rank for model, _, rank in wanted if model == name and rank})
        layer = Layer(find(name)[1], "bf16", ranks, 8, generator)
        ours = Ours(layer, None)
        for _, tokens, rank in [case for case in wanted if case[0] == name]:
            batch = cases.draw_batch(layer.model, tokens, 8, generator)
            for _ in range(2):
                ours.run(batch, rank)
            flush.zero_()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)  # its kernel marks the start of a case
            ours.run(batch, rank)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def table(output):
    """ncu's raw page as dicts, in the order of the launches."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise SystemExit("ncu counted nothing:\n" + output[-2000:])
    rows = list(csv.reader(lines))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def summary(row):
    kernel = re.sub(r"void |<unnamed>::|\(anonymous namespace\)::|\(.*", "", row["Kernel Name"])
    made = {"kernel": kernel}
    for metric, name in METRICS.items():
        text = row.get(metric, "").replace(",", "")
        if text:
            made[name] = round(float(text) * SCALE.get(name, 1), 2)
    stalls = {s: float(row.get(STALL.format(s), "0").replace(",", "") or 0) for s in STALLS}
    total = sum(stalls.values()) or 1
    top = sorted(stalls, key=stalls.get, reverse=True)[:4]
    made["stalls_percent"] = {s: round(100 * stalls[s] / total) for s in top}
    if made.get("us"):
        moved = made.get("dram_read_mb", 0) + made.get("dram_write_mb", 0)
        made["dram_gb_s"] = round(1e3 * moved / made["us"])
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args()
    wanted = [(m, int(tokens), int(rank)) for m, tokens, rank in map(split, args.cases.split(","))]
    wanted.sort()
    if os.environ.get(INSIDE):
        return run(wanted)
    metrics = ",".join([*METRICS, *(STALL.format(s) for s in STALLS)])
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", "--print-units", "base", "--metrics", metrics]
    command += [sys.executable, "-m", "benchmarks.kernels", "--cases", args.cases]
    done = subprocess.run(
        command, env=os.environ | {INSIDE: "1"}, capture_output=True, text=True, timeout=300
    )
    made, at = [], -1
    for row in map(summary, table(done.stdout)):
        if "spin_kernel" in row["kernel"]:
            at += 1
            continue
        model, tokens, rank = wanted[at]
        made.append({"model": model, "tokens": tokens, "rank": rank} | row)
    for row in made:
        print(
            f"{row['model']:18} {row['tokens']:6} r{row['rank']:<3} {row['kernel'][:44]:44}"
            f" {row.get('us', 0):8.1f} us  tensor {row.get('tensor_percent', 0):3.0f} %"
            f"  issue {row.get('issue_percent', 0):3.0f} %  alu {row.get('alu_percent', 0):3.0f} %"
            f"  fma {row.get('fma_percent', 0):3.0f} %"
            f"  {row.get('dram_gb_s', 0):5} GB/s  {row.get('dram_read_mb', 0):7.1f} MB"
            f"  L2 {row.get('l2_percent', 0):3.0f} %  {row['stalls_percent']}"
        )
    if args.out:
        results.write(args.out, made)


def split(case):
    parts = case.split(":")
    if len(parts) != 3:
        raise SystemExit(f"{case!r} is not model:tokens:rank")
    try:
        find(parts[0])
    except ValueError as why:
        raise SystemExit(str(why)) from why
    return parts


if __name__ == "__main__":
    main()
