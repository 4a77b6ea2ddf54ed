"""`moelora replay`: calls an operator again with the arguments of a dump."""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from moelora import _C, trace


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("replay", help="repeat a call that MOELORA_DUMP wrote")
    parser.add_argument("file", help="what MOELORA_DUMP left")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="(default: cuda where it can be used)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: the call returns now; 1: it raises; 2: there is nothing to call."""
    try:
        content = trace.load_dump(args.file)
    except (OSError, ValueError) as error:
        print(f"moelora replay: {error}", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if _C.has_cuda() else "cpu")
    arguments = [_to(value, device) for value in content["args"]]
    op = getattr(torch.ops.moelora, content["op"]).default
    print(trace.describe(op, tuple(arguments)))
    print(f"raised by moelora {content['moelora']}, torch {content['torch']}: {content['error']}")
    try:
        out = op(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        print(f"raises now: {error}")
        return 1
    print("returns now:", ", ".join(_summary(t) for t in _tensors(out)) or "nothing")
    return 0


def _to(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return trace.moved(value, device) if isinstance(value, Tensor) else value


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out or ())


def _summary(t: Tensor) -> str:
    finite = bool(t.isfinite().all()) if t.is_floating_point() else True
    return f"{list(t.shape)} {t.dtype}{'' if finite else ', not all finite'}"
