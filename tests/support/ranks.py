"""Processes of torch.distributed, for the tests that run a program in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from covering import NIGHTLY
from torch import distributed

ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# What torchrun does here, but modules are imported once: half of the time of such a test.
FORKS = """
import importlib, os, runpy, signal, socket, sys
_, modules, size, *sys.argv = sys.argv
for name in modules.split():
    importlib.import_module(name)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
os.environ["WORLD_SIZE"] = size
ranks = list(map(str, range(int(size))))
for rank in ranks:
    if os.fork() == 0:
        signal.alarm(270)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
sys.exit(any([os.wait()[1] for _ in ranks]))
"""


def say(line: str) -> None:
    """Print a line by a write of its own that begins with a new line, since buffers of what
    libraries print end anywhere in a line: other processes then neither split nor begin this one.
    """
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\n{line}\n".encode())


def work(run: Callable[[str], None], cases: list[str]) -> None:
    """Run the cases in a process that `run_cases` started."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for case in cases:
        run(case)
        say(f"rank {distributed.get_rank()}: {case}")
    distributed.destroy_process_group()


def same_on_all(tensor: torch.Tensor) -> bool:
    """Whether all processes have the same bits."""
    every = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in every)


def fails_on_last(error: type[Exception], match: str):
    """Expect this error on the last process, and on others one that names that process."""
    last = distributed.get_world_size() - 1
    if distributed.get_rank() == last:
        return pytest.raises(error, match=match)
    return pytest.raises(RuntimeError, match=f"rank {last} .* failed: {error.__name__}.*{match}")


def run_ranks(program: str, *words: str, modules: str, processes: int = 2, **env: str) -> list[str]:
    """The lines that all print. On CPUs, CI imports the modules, by their names, once for all."""
    forks = env.items() >= ON_CPUS.items() and not NIGHTLY
    command = ["-c", FORKS, modules] if forks else TORCHRUN
    command = [*command, str(processes)]
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, *command, program, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env,
        capture_output=True,
        text=True,
        timeout=285,
    )
    failed = f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr[-9000:]}"
    assert done.returncode == 0, failed
    return done.stdout.splitlines()


def run_cases(program: str, *words: str, cases: list[str], processes: int = 2, **more: str) -> None:
    """Each process prints a line for each case that it has done, after the other arguments."""
    lines = run_ranks(program, *words, *cases, processes=processes, **more)
    done = [f"rank {rank}: {case}" for rank in range(processes) for case in cases]
    assert sorted(line for line in lines if line.startswith("rank ")) == sorted(done)
