"""Two processes of torch.distributed, for the tests that run a program in both."""

from __future__ import annotations

import os
import subprocess
import sys

from covering import NIGHTLY

ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# What torchrun does here, but modules are imported once: half of the time of such a test.
FORKS = """
import importlib, os, runpy, signal, socket, sys
_, modules, *sys.argv = sys.argv
for name in modules.split():
    importlib.import_module(name)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
os.environ["WORLD_SIZE"] = "2"
for rank in "01":
    if os.fork() == 0:
        signal.alarm(180)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
sys.exit(any([os.wait()[1] for _ in "01"]))
"""


def run_two(program: str, *words: str, modules: str, **env: str) -> list[str]:
    """The lines that both print. On CPUs, CI imports the modules, by their names, once for both."""
    forks = env.items() >= ON_CPUS.items() and not NIGHTLY
    command = ["-c", FORKS, modules] if forks else TORCHRUN
    done = subprocess.run(
        [sys.executable, *command, program, *words],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()
