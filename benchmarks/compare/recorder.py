"""Pytest plugin of `benchmarks.compare bits`: digests of what operators return and write in tests.

Each process appends a line of JSON for each test to a file in the folder $MOELORA_DIGESTS: its id,
whether it passed, and for each call of an operator its name and a digest of every tensor.
"""

import hashlib
import json
import os
import pathlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER = pathlib.Path(os.environ["MOELORA_DIGESTS"])
# Uninitialized memory holds these bytes: large and finite in bfloat16 and float32, NaN in float16,
# no index. On a CPU glibc fills it ($MALLOC_PERTURB_).
POISON = 0x7F
# Blocks of both pools of torch's allocator: those below and from 1 MiB on.
POISONED = (1 << 28, 1 << 19, 1 << 19, 1 << 12)


def digest(tensor):
    tensor = tensor.detach().cpu().contiguous()
    bits = hashlib.sha1(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {bits}"


def is_real(tensor):
    return isinstance(tensor, torch.Tensor) and type(tensor).__name__ in ("Tensor", "Parameter")


class Recorder(TorchDispatchMode):
    """Records calls of moelora's operators, but those that a CUDA graph captures."""

    def __init__(self):
        super().__init__()
        self.calls = []

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
            values = torch.utils._pytree.tree_leaves([out, *map(given.get, written)])
            self.calls.append([name[len("moelora::") :], *map(digest, filter(is_real, values))])
        return out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    recorder, passed = Recorder(), False
    try:
        with recorder:
            made = yield
        passed = True
        return made
    finally:
        if recorder.calls:
            line = {"test": item.nodeid, "passed": passed, "calls": recorder.calls}
            FOLDER.mkdir(parents=True, exist_ok=True)
            with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
                print(json.dumps(line), file=file)
