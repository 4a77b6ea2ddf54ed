"""Pytest plugin of `benchmarks.compare bits`: digests of what operators return and write in tests.

Each process appends a line of JSON for each test to a file in the folder $MOELORA_DIGESTS: its id,
whether it passed, and for each call of an operator its name and a digest of every tensor. If
$MOELORA_KEEP is set, line N of process P has the tensors in P-N.pt.
"""

import contextlib
import hashlib
import json
import os
import pathlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER, KEEP = pathlib.Path(os.environ["MOELORA_DIGESTS"]), os.environ.get("MOELORA_KEEP")
# Uninitialized memory holds these bytes: large and finite in bfloat16 and float32, NaN in float16,
# no index. On a CPU glibc fills it ($MALLOC_PERTURB_).
POISON = 0x7F
# Blocks of both pools of torch's allocator: those below and from 1 MiB on.
POISONED = (1 << 28, 1 << 19, 1 << 19, 1 << 12)


def digest(tensor):
    bits = hashlib.sha1(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {bits}"


def is_real(tensor):
    return isinstance(tensor, torch.Tensor) and type(tensor).__name__ in ("Tensor", "Parameter")


class Recorder(TorchDispatchMode):
    """Records calls of moelora's operators, but those that a CUDA graph captures."""

    def __init__(self):
        super().__init__()
        self.calls, self.kept = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        ours = name.startswith("moelora::")
        ours = ours and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        if ours and torch.cuda.is_available():
            for block in [torch.empty(n, dtype=torch.uint8, device="cuda") for n in POISONED]:
                block.fill_(POISON)
        out = func(*args, **kwargs)
        if ours:
            places = zip(func._schema.arguments, args, strict=False)
            given = {a.name: value for a, value in places} | kwargs
            written = [a.name for a in func._schema.arguments if a.alias_info is not None]
            tensors = [out, *(given.get(name) for name in written)]
            self.record(name.removeprefix("moelora::"), tensors)
        return out

    def record(self, name, values):
        flat = torch.utils._pytree.tree_leaves(values)
        tensors = [t.detach().cpu().contiguous().clone() for t in flat if is_real(t)]
        self.calls.append([name, *map(digest, tensors)])
        if KEEP:
            self.kept.append(tensors)


lines = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    global lines
    recorder, passed = Recorder(), False
    try:
        with recorder:
            made = yield
        passed = True
        return made
    finally:
        if recorder.calls:
            line = {"test": item.nodeid, "passed": passed, "calls": recorder.calls}
            with contextlib.suppress(FileExistsError):
                FOLDER.mkdir(parents=True)
            with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
            if KEEP:
                torch.save(recorder.kept, FOLDER / f"{os.getpid()}-{lines}.pt")
            lines += 1
