"""vLLM's own fused-MoE and MoE-LoRA kernels as rivals.

Looked for in $MOELORA_PEERS (default .peers/vllm_kernels), where `vk/` holds a copy that runs
without vLLM: a `vk_layer` module beside a minimal `vllm` package.
"""

import os
import pathlib
import sys

import torch


def load():
    """The peer's layer module, or None where it is not there."""
    root = pathlib.Path(os.environ.get("MOELORA_PEERS", ".peers/vllm_kernels")).resolve()
    if not (root / "vk" / "vk_layer.py").exists():
        return None
    os.environ.setdefault("VK_MODE", "cuda")
    sys.path.insert(0, str(root / "vk"))
    import vk_layer
    from vllm import _custom_ops

    if not _custom_ops.load_cuda():
        raise RuntimeError(f"the peer's CUDA operators did not build: {_custom_ops.CUDA_NOTE}")
    return vk_layer


class Peer:
    """vLLM's layer over the same weights, adapters and batches as ours."""

    def __init__(self, vk, model, w13, w2, factors, batches):
        tokens = batches[0].x.shape[0]
        self.layer = vk.MoELayer(w13, w2, tokens, model.top_k, w13.device)
        self.lora = vk.Lora(factors.a13, factors.b13, factors.a2, factors.b2, w13.device)
        adapters = factors.a2.shape[0]
        self.sets = [
            vk.TokenSet(b.x, b.topk_ids, b.topk_weights, b.mapping.to(torch.int64), adapters)
            for b in batches
        ]

    def base(self, i):
        return self.layer.run(self.sets[i])

    def run(self, i, mode="default"):
        return self.layer.run(self.sets[i], self.lora, mode)

    def modes(self, rank):
        """The paths that vLLM could take for this case, its default first."""
        pairs = self.sets[0].topk_ids.numel()
        modes = ["default", "oneshot", "legacy"]
        if pairs <= 1024:
            modes += ["oneshotN"] + (["small"] if rank <= 64 else [])
        return modes
