"""`moelora replay`: call an operator with the arguments of a dump."""

import argparse
import sys
from functools import partial

import torch
from torch import Tensor

from moelora import _C
from moelora.operators import dump, trace
from moelora.operators.schema import OPERATORS
from moelora.operators.terminal import printable
from moelora.operators.torch_private import tree_map_only


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="what MOELORA_DUMP left")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="(default: cuda where it can be used)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0: the call returns; 1: it raises; 2: there is nothing to call."""
    device = args.device or ("cuda" if _C.has_cuda() else "cpu")
    try:
        if device == "cuda" and not _C.has_cuda():
            raise ValueError("--device cuda: there is no usable GPU, or this build has no kernels")
        content = dump.load(args.file)
        arguments = tree_map_only(Tensor, partial(dump.moved, device=device), content["args"])
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: exceeds the device
        print(f"moelora replay: {printable(error)}", file=sys.stderr)
        return 2
    op = getattr(OPERATORS, content["op"]).default
    print(trace.describe(op, tuple(arguments)))
    versions = f"moelora {printable(content['moelora'])}, torch {printable(content['torch'])}"
    print(f"raised by {versions}: {printable(content['error'])}")
    try:
        out = op(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        print(f"raises now: {printable(error)}")
        return 1
    print("returns now:", ", ".join(_summary(t) for t in dump.tensors_in(out)) or "nothing")
    return 0


def _summary(t: Tensor) -> str:
    finite = bool(t.isfinite().all()) if t.is_floating_point() else True
    return f"{list(t.shape)} {t.dtype}{'' if finite else ', not all finite'}"
