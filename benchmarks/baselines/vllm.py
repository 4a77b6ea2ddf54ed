"""vLLM's fused-MoE and MoE-LoRA kernels, from a copy that runs without vLLM.

Searched in $MOELORA_PEERS (default .peers/vllm_kernels): `vk/` has a `vk_layer` module next to a
minimal `vllm` package.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from moelora.bench.baselines import Options, require
from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.timing import Run, Runs, on


def load() -> Any:
    """Layer module of the copy, or None."""
    root = pathlib.Path(os.environ.get("MOELORA_PEERS", ".peers/vllm_kernels")).resolve()
    if not (root / "vk" / "vk_layer.py").exists():
        return None
    os.environ.setdefault("VK_MODE", "cuda")
    if str(root / "vk") not in sys.path:
        sys.path.insert(0, str(root / "vk"))
    import vk_layer
    from vllm import _custom_ops

    if not _custom_ops.load_cuda():
        raise RuntimeError(f"the peer's CUDA operators did not build: {_custom_ops.CUDA_NOTE}")
    return vk_layer


class VLLM:
    def __init__(self, layer: Layer, options: Options):
        require(layer.device.type == "cuda", "its kernels are for GPUs")
        require(layer.dtype != "fp32", "its kernels are for bf16 and fp16")
        require(layer.model.activation == "silu", "driven here with silu only")
        self.layer = layer
        self.vk = load()
        require(self.vk, "$MOELORA_PEERS has no vk/vk_layer.py")
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
