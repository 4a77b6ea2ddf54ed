"""vLLM's fused-MoE and MoE-LoRA kernels, from a copy that runs without vLLM."""

from collections.abc import Sequence

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
