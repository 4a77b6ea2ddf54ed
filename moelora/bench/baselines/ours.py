"""Our layer, and the loop that a PyTorch user would write."""

import time
from copy import copy

import moelora
from moelora.bench.baselines import Layer, Options, TooSlow, require, synchronize
from moelora.bench.timing import Run
from moelora.reference import naive_fused_experts_lora
from moelora.reference.fp8 import is_w8a8


def arguments(layer: Layer, batch, rank) -> tuple[tuple, dict]:
    """Of fused_experts_lora and of its reference; rank 0 is the layer without adapters."""
    args = batch.x, layer.w13, layer.w2, batch.topk_weights, batch.topk_ids
    kwargs = {"activation": layer.model.activation, "w13_bias": layer.b13, "w2_bias": layer.b2}
    if rank:
        factors = layer.stacks[rank]
        kwargs |= {
            "token_lora_mapping": batch.mapping,
            "w13_lora_a": factors.a13,
            "w13_lora_b": factors.b13,
            "w2_lora_a": factors.a2,
            "w2_lora_b": factors.b2,
        }
    return args, kwargs


class Ours:
    name = "ours"
    of = None  # the layer that it computes, if it is another

    def __init__(self, layer: Layer, options: Options):
        self.layer = layer

    def run(self, batch, rank):
        args, kwargs = arguments(self.layer, batch, rank)
        return moelora.fused_experts_lora(*args, **kwargs)

    def runs(self, batches):
        return {
            (self.name, rank): Run(lambda i, rank=rank: self.run(batches[i], rank), of=self.of)
            for rank in (*self.layer.stacks, 0)
        }


class Invariant(Ours):
    """In the batch-invariant mode."""

    name = "ours_invariant"

    def run(self, batch, rank):
        args, kwargs = arguments(self.layer, batch, rank)
        return moelora.fused_experts_lora(*args, **kwargs, batch_invariant=True)


class Unpacked(Ours):
    """The same weights in the activations' dtype: what quantised ones must not lose against."""

    def __init__(self, layer: Layer, options: Options):
        require(layer.model.format, "weights are not quantised")
        self.name = f"ours_{layer.dtype}"
        self.layer = copy(layer)
        self.layer.w13, self.layer.w2 = layer.w13.unpack(), layer.w2.unpack()
        self.of = self.layer if is_w8a8(layer.w13) else None


class Loop:
    def __init__(self, layer: Layer, options: Options):
        self.layer, self.patience_s = layer, options.patience_s

    def run(self, batch, rank):
        args, kwargs = arguments(self.layer, batch, rank)
        return naive_fused_experts_lora(*args, **kwargs)

    def first(self, batch, rank):
        started = time.perf_counter()
        out = self.run(batch, rank)
        synchronize(out)
        seconds = time.perf_counter() - started
        if seconds > self.patience_s:
            raise TooSlow(f"{seconds:.1f} s a call")
        return out

    def runs(self, batches):
        return {
            ("loop", rank): Run(
                call=lambda i, rank=rank: self.run(batches[i], rank),
                first=lambda rank=rank: self.first(batches[0], rank),
                eager=True,
            )
            for rank in self.layer.stacks
        }
