"""vLLM's fused-MoE and MoE-LoRA kernels, from copies that run without vLLM.

Of quantized experts, Marlin and Triton of FP8: the peer's `vk/vq_layer.py` calls vLLM's kernels in
vLLM's order, on the same values as ours. For gpt-oss they omit the biases and its activation: they
apply SiLU to the first half of the rows instead, which is less work. Results are compared with
float64 of what they compute.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from benchmarks.baselines import load
from moelora.bench.baselines import require
from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.timing import Run, Runs, on


class VLLM:
    def __init__(self, layer: Layer):
        require(layer.device.type == "cuda", "its kernels are for GPUs")
        require(layer.dtype != "fp32", "its kernels are for bf16 and fp16")
        require(layer.model.activation == "silu", "driven here with silu only")
        self.layer = layer
        self.vk = load("vk_layer", "vllm_kernels")
        from vllm import _custom_ops

        require(_custom_ops.load_cuda(), f"the peer's CUDA operators: {_custom_ops.CUDA_NOTE}")
        self.loras = {
            rank: self.vk.Lora(f.a13, f.b13, f.a2, f.b2, layer.device)
            for rank, f in layer.stacks.items()
        }

    def runs(self, batches: Sequence[Batch]) -> Runs:
        w13, w2 = self.layer.tensors
        theirs = self.vk.MoELayer(w13, w2, len(batches[0].x), self.layer.model.top_k, w13.device)
        sets = [
            self.vk.TokenSet(b.x, b.topk_ids, b.topk_weights, b.mapping.long(), self.layer.adapters)
            for b in batches
        ]
        runs = {("vllm_base", 0): Run(lambda i: theirs.run(sets[i]))}
        for rank, factors in self.loras.items():
            runs["vllm_default", rank] = Run(on(sets, theirs.run, factors, "default"))
        return runs


def grown(t: Tensor, rows: int, columns: int) -> Tensor:
    """`t` zero-padded to this number of rows and columns."""
    more = columns - t.shape[-1], rows - t.shape[-2]
    return pad(t, (0, more[0], 0, more[1])) if any(more) else t


def computed(layer: Layer) -> Layer | None:
    """The layer that they compute, or None if it is `layer`."""
    if layer.model.activation == "silu" and not layer.model.bias:
        return None
    other = copy(layer)
    other.model = replace(layer.model, activation="silu", bias=False)
    other.b13 = other.b2 = None
    return other


class Marlin:
    """MarlinExperts: vLLM's choice for 4-bit experts on Hopper with LoRA enabled."""

    schemes = {"mxfp4": "mxfp4", "int4": "int4"}

    def __init__(self, layer: Layer):
        model, format = layer.model, layer.model.format
        require(layer.device.type == "cuda", "its kernels are for GPUs")
        require(layer.dtype == "bf16", "driven here in bf16 only")
        require(format in self.schemes, f"driven here for {' and '.join(self.schemes)} only")
        require(model.activation in ("silu", "swigluoai"), "driven here with silu only")
        self.vq, self.layer = load("vq_layer", "vllm_quant"), layer
        require(self.vq.load_cuda(), f"the peer's CUDA operators: {self.vq.CUDA_NOTE}")
        self.check()
        assert format
        self.weights = self.packed(self.schemes[format])
        columns, rows = self.weights.Hp, self.weights.Ip
        self.loras = {}
        for rank, f in layer.stacks.items():
            gate_up = (
                [grown(a, rank, columns) for a in f.a13],
                [grown(b, rows, rank) for b in f.b13],
            )
            down = grown(f.a2, rank, rows), grown(f.b2, columns, rank)
            self.loras[rank] = self.vq.L.Lora(*gate_up, *down, layer.device)

    def check(self) -> None:
        require(self.vq.HAVE_MARLIN, f"the peer has no Marlin: {self.vq.CUDA_NOTE}")

    def packed(self, scheme: str) -> Any:
        """Our checkpoint as their weights, padded as vLLM pads them."""
        model, checkpoint = self.layer.model, self.layer.checkpoint

        class Ours(self.vq.Weights):  # type: ignore[misc, name-defined] # of a module found by path
            # The peer's method has this spelling.
            def quantised(self, expert: int, projection: str) -> tuple[Tensor, Tensor, None]:
                values, scales = (t[expert] for t in checkpoint[projection])
                if (self.Hp, self.Ip) != (self.H, self.I):  # of [N, K / so many columns]
                    values, scales = (self.padded(t, projection) for t in (values, scales))
                return values, scales, None

            def padded(self, t: Tensor, projection: str) -> Tensor:
                if projection == "w2":
                    return grown(t, self.Hp, t.shape[1] * self.Ip // self.I)
                halves = t.view(2, self.I, -1)
                return grown(halves, self.Ip, t.shape[1] * self.Hp // self.H).flatten(0, 1)

        sizes = model.experts, model.hidden, model.intermediate
        assert hasattr(self.vq.Weights, "quantised")
        padded = self.vq.pad_dims(scheme, *sizes[1:])
        require(model.format == "mxfp4" or padded == sizes[1:], f"padded to {padded} by vLLM")
        return Ours(scheme, *sizes, None, self.layer.device)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        model, vq, width = self.layer.model, self.vq, self.weights.Hp
        tokens = len(batches[0].x)
        theirs = vq.make_layer(self.weights, tokens, model.top_k, self.layer.device)
        sets = []
        for b in batches:
            who = b.mapping.long(), self.layer.adapters
            x = grown(b.x, tokens, width)
            sets.append(vq.L.TokenSet(x, b.topk_ids, b.topk_weights, *who))

        def run(i: int, lora: Any = None) -> Tensor:
            return theirs.run(sets[i], lora)[:, : model.hidden]

        of = computed(self.layer)
        runs = {("vllm_base", 0): Run(run, of=of)}
        for rank, lora in self.loras.items():
            runs["vllm_lora", rank] = Run(partial(run, lora=lora), of=of)
        return runs


class TritonFP8(Marlin):
    """TritonExperts: vLLM's choice for FP8 blocks on Hopper with LoRA enabled."""

    schemes = {"fp8_block": "fp8"}

    def check(self) -> None:
        require(self.layer.model.activation == "silu", "driven here with silu only")
