"""Ways to run a layer. Each is a class that takes a `Layer` and raises `Skipped` if it does not
support it; `runs(batches)` returns {(who, rank): Run}, where rank 0 is the layer without adapters.

To add one, write such a class and name it in BASELINES, with its module if it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moelora.bench import cases
from moelora.bench.layer import Layer

if TYPE_CHECKING:
    from moelora.bench.timing import Runs


class Skipped(Exception):
    """Why a baseline is not timed."""


class TooSlow(Skipped):
    """Larger ranks and batches of this layer are skipped too."""


@dataclass
class Options:
    """User options of baselines."""

    patience_s: float = 1.5  # maximum time of one call of a baseline


class Baseline(Protocol):
    """A way to run a layer."""

    def runs(self, batches: Sequence[cases.Batch]) -> Runs: ...


def baselines_of(
    layer: Layer, names: Iterable[str], options: Options
) -> tuple[list[Baseline], dict[str, str]]:
    """([baseline], {name: reason}); ours comes first."""
    found: list[Baseline] = []
    absent: dict[str, str] = {}
    for name in ("ours", *names):
        try:
            reads = name in READ_QUANTIZED or not layer.model.format
            require(reads, "it reads no quantized weights")
            found.append(_load(name)(layer, options))
        except Skipped as why:
            absent[name] = str(why)
        except Exception as problem:  # of a package that is not ours
            if name == "ours":
                raise
            absent[name] = f"{type(problem).__name__}: {problem}"
    return found, absent


def _load(name: str) -> Any:
    """Class of a baseline. Its module is imported on demand, as it may need other packages."""
    from importlib import import_module

    module, _, symbol = BASELINES[name].partition(":")
    package = "" if "." in module else "moelora.bench.baselines."
    return getattr(import_module(package + module), symbol)


BASELINES = {
    "ours": "ours:Ours",
    "unpacked": "ours:Unpacked",
    "unpacking": "ours:Unpacking",
    "loop": "ours:Loop",
    "separate": "ours:Separate",
    "vllm": "native:VLLM",
    "grouped_mm": "native:GroupedMM",
    "transformers": "transformers:Transformers",
}
READ_QUANTIZED = {"ours", "unpacked", "unpacking"}
ABOUT = {
    "unpacked": "moelora on quantized weights that were unpacked before",
    "unpacking": "moelora on quantized weights that every call unpacks",
    "loop": "experts one by one in PyTorch: index_select, mm, two more products per adapter",
    "separate": "moelora's base products, then its kernels that add adapters to them",
    "vllm": "an installed vLLM's layer, without adapters",
    "grouped_mm": "torch's grouped GEMM: twice for the base, six times more for adapters",
    "transformers": "transformers' experts with PEFT, which serves one adapter at a time",
}
DEFAULTS = {"cuda": ["separate", "vllm", "grouped_mm", "loop"], "cpu": ["loop", "transformers"]}
DEFAULTS_OF_QUANTIZED = {"cuda": ["unpacked"], "cpu": ["unpacked", "unpacking"]}


def require(condition: object, why: str) -> None:
    """Raise Skipped(why) unless `condition` holds."""
    if not condition:
        raise Skipped(why)


def require_no_biases(layer: Layer) -> None:
    require(not layer.model.bias, "driven here without biases")


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
