"""Ways to run a layer. Each is a class that takes a `Layer` and raises `Skipped` if it does not
support it; `runs(batches)` returns {(who, rank): Run}, where rank 0 is the layer without adapters.

To add one, write such a class and name it in BASELINES, with its module if it is elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from moelora.bench import cases
from moelora.bench.layer import Layer
from moelora.bench.timing import Runs


class Skipped(Exception):
    """Why a baseline is not timed."""


class TooSlow(Skipped):
    """Larger ranks and batches of this layer are skipped too."""


class Baseline(Protocol):
    """A way to run a layer."""

    def runs(self, batches: Sequence[cases.Batch]) -> Runs: ...


@dataclass(frozen=True)
class Entry:
    """A baseline that users name; its module is imported on demand, as it may need others."""

    symbol: str  # module:class; a module without a dot is one of this package
    about: str
    quantized: bool = False  # whether it reads quantized weights

    def load(self) -> Any:
        module, _, symbol = self.symbol.partition(":")
        package = "" if "." in module else f"{__name__}."
        return getattr(import_module(package + module), symbol)


BASELINES = {
    "unpacked": Entry("ours:Unpacked", "moelora on weights that were unpacked before", True),
    "unpacking": Entry("ours:Unpacking", "moelora on weights that every call unpacks", True),
    "loop": Entry("ours:Loop", "experts one by one in PyTorch, two more products per adapter"),
    "separate": Entry("ours:Separate", "moelora's base products, then its kernels for adapters"),
    "vllm": Entry("native:VLLM", "an installed vLLM's layer, without adapters"),
    "grouped_mm": Entry("native:GroupedMM", "torch's grouped GEMM: 2 calls, 6 more for adapters"),
    "transformers": Entry("transformers:Transformers", "its experts with PEFT, adapter by adapter"),
}
DEFAULTS = {
    "cuda": ["separate", "vllm", "grouped_mm", "loop", "unpacked"],
    "cpu": ["loop", "transformers", "unpacked", "unpacking"],
}


def baselines_of(layer: Layer, names: Iterable[str]) -> tuple[list[Baseline], dict[str, str]]:
    """([baseline], {name: why it is absent}); ours comes first."""
    found: list[Baseline] = [Entry("ours:Ours", "").load()(layer)]
    absent: dict[str, str] = {}
    for name in names:
        try:
            entry = BASELINES[name]
            require(entry.quantized or not layer.model.format, "it reads no quantized weights")
            found.append(entry.load()(layer))
        except Skipped as why:
            absent[name] = str(why)
        except Exception as problem:  # of a package that is not ours
            absent[name] = f"{type(problem).__name__}: {problem}"
    return found, absent


def require(condition: object, why: str) -> None:
    """Raise Skipped(why) unless `condition` holds."""
    if not condition:
        raise Skipped(why)


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
