"""Our layer, our kernels one projection at a time, and the loop that a PyTorch user would write."""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

import moelora
from moelora.bench.baselines import TooSlow, require, synchronize
from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.timing import Run, Runs, on
from moelora.reference import activate, naive_fused_experts_lora
from moelora.reference.fp8 import is_w8a8
from moelora.reference.routing import as_tensor


def arguments(layer: Layer, batch: Batch, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of fused_experts_lora and of its reference; rank 0: the layer without adapters."""
    args = batch.x, layer.w13, layer.w2, batch.topk_weights, batch.topk_ids
    kwargs: dict[str, Any] = {"activation": layer.model.activation}
    kwargs |= {"w13_bias": layer.b13, "w2_bias": layer.b2}
    if rank:
        f = layer.stacks[rank]
        kwargs |= {"token_lora_mapping": batch.mapping, "w13_lora_a": f.a13, "w13_lora_b": f.b13}
        kwargs |= {"w2_lora_a": f.a2, "w2_lora_b": f.b2}
    return args, kwargs


class Ours:
    name = "ours"
    of: Layer | None = None  # the layer that it computes, if not this one

    def __init__(self, layer: Layer):
        self.layer = layer

    def run(self, batch: Batch, rank: int) -> Tensor:
        args, kwargs = arguments(self.layer, batch, rank)
        return moelora.fused_experts_lora(*args, **kwargs)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        return {
            (self.name, rank): Run(on(batches, self.run, rank), of=self.of)
            for rank in (*self.layer.stacks, 0)
        }


class Unpacked(Ours):
    """The same weights unpacked: the time that quantized ones must not exceed."""

    def __init__(self, layer: Layer):
        require(layer.model.format, "weights are not quantized")
        self.name = f"ours_{layer.dtype}"
        self.layer = copy(layer)
        self.layer.w13, self.layer.w2 = as_tensor(layer.w13), as_tensor(layer.w2)
        self.of = self.layer if is_w8a8(layer.w13) else None


class Unpacking(Ours):
    """Unpacks all weights in every call: the alternative without kernels for a format."""

    name = "ours_unpacking"

    def __init__(self, layer: Layer):
        require(layer.model.format, "weights are not quantized")
        self.layer = layer
        if is_w8a8(layer.w13) and is_w8a8(layer.w2):
            self.layer = self.of = copy(layer)
            for name in ("w13", "w2"):
                as_it_is = replace(getattr(layer, name), x_format="native", x_scale=0.0)
                setattr(self.layer, name, as_it_is)

    def run(self, batch: Batch, rank: int) -> Tensor:
        (x, w13, w2, *routing), kwargs = arguments(self.layer, batch, rank)
        return moelora.fused_experts_lora(x, as_tensor(w13), as_tensor(w2), *routing, **kwargs)


class Separate(Ours):
    """Adapters added after the base product, as engines do it, by our kernels: what fusing buys.
    The activation and the sum over experts are torch's.
    """

    def run(self, batch: Batch, rank: int) -> Tensor:
        layer, f = self.layer, self.layer.stacks.get(rank)
        routing, product = (batch.topk_weights, batch.topk_ids), moelora.fused_moe_lora_gemm
        who: dict[str, Any] = {"token_lora_mapping": batch.mapping}
        gu = product(batch.x, layer.w13, *routing, bias=layer.b13)
        if f:
            who |= {"lora_a": f.a13, "lora_b": f.b13}
            moelora.moe_lora_gate_up_delta(batch.x, *routing, **who, out=gu)
        h = activate(gu, layer.model.activation).flatten(0, 1)
        z = product(h, layer.w2, *routing, bias=layer.b2, mul_routed_weight=True)
        if f:
            who |= {"lora_a": f.a2, "lora_b": f.b2, "mul_routed_weight": True}
            moelora.moe_lora_down_delta(h, *routing, **who, out=z)
        return z.sum(1)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        who = {0: "separate_base"} | dict.fromkeys(self.layer.stacks, "separate")
        return {(name, rank): Run(on(batches, self.run, rank)) for rank, name in who.items()}


class Loop:
    def __init__(self, layer: Layer):
        self.layer = layer

    def run(self, batch: Batch, rank: int) -> Tensor:
        args, kwargs = arguments(self.layer, batch, rank)
        return naive_fused_experts_lora(*args, **kwargs)

    def first(self, batch: Batch, rank: int, patience_s: float) -> Tensor:
        started = time.perf_counter()
        out = self.run(batch, rank)
        synchronize(out)
        seconds = time.perf_counter() - started
        if seconds > patience_s:
            raise TooSlow(f"{seconds:.1f} s a call")
        return out

    def runs(self, batches: Sequence[Batch]) -> Runs:
        runs: Runs = {}
        for rank in self.layer.stacks:
            first = partial(self.first, batches[0], rank)
            runs["loop", rank] = Run(on(batches, self.run, rank), first, eager=True)
        return runs
