"""Data-parallel ranks of a vLLM engine: a process each, which take every Nth prompt.

vLLM has no data-parallel `LLM` in one process: each rank is an engine that is told the others'
address, and steps when they do. `start` starts the command again in every rank.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time

from torch import distributed

RANK, SIZE, STORE = "VLLM_DP_RANK", "VLLM_DP_SIZE", "MOELORA_RANKS_STORE"


def start(module, words, size):
    """Runs the module in every rank. Returns 0, or the first exit status that is not."""
    with tempfile.TemporaryDirectory() as folder:
        told = {
            SIZE: str(size),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            # Below the ports that a system gives out; vLLM takes the next ones, too.
            "VLLM_DP_MASTER_PORT": str(20000 + 16 * (os.getpid() % 600)),
            STORE: os.path.join(folder, "store"),  # a file: no other process can take it
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the engine of a rank steps with the others
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # takes functions to it
        }
        command = [sys.executable, "-m", module, *words]
        ranks = [{RANK: str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} for rank in range(size)]
        running = [subprocess.Popen(command, env=os.environ | told | rank) for rank in ranks]
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.2)
        for process in running:
            process.kill()
        return next(filter(None, codes), 0)


class Ranks:
    """This process among its peers; alone if it was not started by `start`."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get(RANK, 0)), int(os.environ.get(SIZE, 1))
        if self.size > 1:
            method = f"file://{os.environ[STORE]}"
            sizes = {"rank": self.rank, "world_size": self.size}
            distributed.init_process_group("gloo", init_method=method, **sizes)

    def share(self, items):
        return items[self.rank :: self.size]

    def gather(self, mine):
        """Waits for all ranks, and returns the results of all prompts in the prompts' order."""
        if self.size == 1:
            return mine
        parts = [None] * self.size
        distributed.all_gather_object(parts, mine)
        turns = itertools.zip_longest(*parts)
        return [one for turn in turns for one in turn if one is not None]
