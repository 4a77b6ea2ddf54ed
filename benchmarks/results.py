"""Result files: {"meta": {...}, "cases": [...]}, one run each."""

import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys

import torch

import moelora


def commit():
    """The commit that is measured: $MOELORA_COMMIT where the tree travels without its history."""
    if os.environ.get("MOELORA_COMMIT"):
        return os.environ["MOELORA_COMMIT"]
    here = pathlib.Path(__file__).parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=here,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip() or "unknown"


def gpu_state():
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        run = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        return run.stdout.strip()
    except OSError:
        return ""


def meta():
    cuda = torch.cuda.is_available()
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "gpu_state": gpu_state() if cuda else "",
        "moelora": moelora.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "python " + shlex.join(sys.orig_argv[1:]),
    }


def write(path, cases, **more):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    head = json.dumps(meta() | more, indent=2)
    path.write_text(f'{{"meta": {head},\n"cases": [\n{lines}\n]}}\n')
