"""Data-parallel ranks of a vLLM engine: a process each, which take every Nth prompt.

vLLM has no data-parallel engine in one process: each rank is an engine that is told the others'
address, and steps when they do. `start` starts the command again in every rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile

RANK, SIZE, STORE = "VLLM_DP_RANK", "VLLM_DP_SIZE", "MOELORA_RANKS_STORE"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(module: str, words: list[str], size: int) -> int:
    """Runs the module in every rank; the first exit status that is not 0, once one ends badly."""
    with tempfile.TemporaryDirectory() as folder:
        return _start(module, words, size, os.path.join(folder, "store"))


def _start(module: str, words: list[str], size: int, store: str) -> int:
    told = {
        SIZE: str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(free_port()),
        STORE: store,  # a file: another engine cannot take it, unlike a port
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as such engines need
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # takes `moe_layers` to vLLM's own processes
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=os.environ | told | {RANK: str(rank), "VLLM_DP_RANK_LOCAL": str(rank)},
        )
        for rank in range(size)
    ]
    while processes:
        for process in list(processes):
            try:
                code = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if code:
                for other in processes:
                    other.kill()
                return code
            processes.remove(process)
    return 0


class Ranks:
    """This process among its peers; alone if it was not started by `start`."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get(RANK, 0)), int(os.environ.get(SIZE, 1))
        if self.size > 1:
            from torch import distributed

            distributed.init_process_group(
                "gloo",
                init_method=f"file://{os.environ[STORE]}",
                rank=self.rank,
                world_size=self.size,
            )

    def share(self, items: list) -> list:
        return items[self.rank :: self.size]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            from torch import distributed

            distributed.barrier()

    def gather(self, mine: list) -> list:
        """What all have made of their shares, in the order of the whole."""
        if self.size == 1:
            return mine
        from torch import distributed

        found: list = [None] * self.size
        distributed.all_gather_object(found, mine)
        whole = [None] * sum(map(len, found))
        for rank, some in enumerate(found):
            whole[rank :: self.size] = some
        return whole
