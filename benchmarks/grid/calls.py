"""Plans forced on calls of the grid, and the tensors to which calls write."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cases import Spec

from moelora import _C

Calls = Iterator[tuple[str, Callable]]

DTYPES = {
    "cpu": {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16},
    "cuda": {"bf16": torch.bfloat16, "f16": torch.float16},
}


def portable(device: str) -> list[str]:
    """The plan that limits a GPU to portable kernels."""
    return ["cc80"] if device == "cuda" else []


# Kinds of kernels: of a layer, of its backward, around its projections, of deltas. A kind
# is the role, the first word of a variant's name, and further words that the name must contain. One
# variant of each role can be forced.
BASE = ("gemm", "decode")
BACK = ("back",)
AROUND = ("sort", "shrink blocks", "shrink segments", "sum")
DELTA = ("sort", "shrink windows", "shrink segments", "expand", "delta", "mlp", "sum")


def rows(device: str, dtype: torch.dtype, *kinds: str) -> list[str]:
    """The variants of this build and machine that can be forced for `dtype`."""
    (word,) = (word for word, known in DTYPES["cpu"].items() if known == dtype)

    def is_of(kind: str, role: str, of: str, words: list[str]) -> bool:
        wanted, *more = kind.split()
        return role == wanted and of in (word, "i32") and set(more) <= set(words)

    here = [v for v in _C.usable() if ("_sm" in v) == (device == "cuda")]
    return [
        v for v in here for r, of, *w in [v.split("_")] if any(is_of(k, r, of, w) for k in kinds)
    ]


def plans(device: str, dtype: torch.dtype) -> list[str]:
    """The projections and whole layers that can be forced for `dtype`, and `portable`."""
    return rows(device, dtype, *BASE) + portable(device)


def planned(how: str, call: Callable):
    """`call()` with a forced variant or capability; restores those of the environment
    afterwards."""
    try:
        if how.startswith("cc"):
            _C.limit_capability(int(how[2:]))
        else:
            _C.force_variant(how)
        return call()
    finally:
        _C.force_variant(os.environ.get("MOELORA_FORCE_VARIANT") or None)
        _C.limit_capability(int(os.environ.get("MOELORA_MAX_CC") or 0))


def with_plans(calls: dict[str, Callable], forced: Iterable[str], table: bool = True) -> Calls:
    """Each call as the library plans it, if `table`, then by all of `forced`."""
    for name, call in calls.items():
        if table:
            yield name, call
        for how in forced:
            yield f"{name}, {how}", partial(planned, how, call)


def each_dtype(device: str, specs: dict[str, Spec], calls: Callable[[str, Spec], Calls]):
    """A group of `calls` for each spec and dtype."""
    for name, spec in specs.items():
        for word, dtype in DTYPES[device].items():
            yield f"{name} {word}", partial(calls, device, replace(spec, dtype=dtype))


def present(arguments: dict, *needed: str) -> dict:
    """Drop absent arguments, which older builds may not have, except those in `needed`."""
    return {k: v for k, v in arguments.items() if v is not None or k in needed}


def filled(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """A random base product with the device and dtype of `like`; some values are -0."""
    make = torch.Generator(like.device).manual_seed(len(shape))
    values = torch.randn(shape, generator=make, device=like.device)
    values.view(-1)[::5] = -0.0
    return values.to(like.dtype)
