"""transformers' experts modules with PEFT adapters, as their users run them.

The module is the experts module of a real one-layer model, with the same tensors as ours and
`set_experts_implementation`, as its users call it. PEFT targets the 3-D expert weights
(`target_parameters`); it serves one adapter per forward and folds it into a copy of all expert
weights for that forward, so a mixed batch runs adapter by adapter over the rows of that adapter.
Gate and up share one A there: pass factors whose two A are equal.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelora.bench.baselines import Skipped, TooSlow, require, synchronize
from moelora.bench.cases import Batch
from moelora.bench.layer import Factors, Layer
from moelora.bench.timing import Run, Runs, on

if TYPE_CHECKING:
    from peft import PeftModel

IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
COPY_LIMIT = 4e9  # bytes of weights that batched_mm may gather per forward


class Transformers:
    """One experts module over w13 [E, 2I, K], w2 [E, K, I] and the adapters of several ranks."""

    def __init__(self, layer: Layer):
        for package in ("transformers", "peft"):
            require(importlib.util.find_spec(package), f"{package} is not installed")
        require(layer.model.activation == "silu", "driven here with silu only")
        for factors in layer.stacks.values():
            require(torch.equal(*factors.a13), "PEFT's expert weights have one A for gate and up")
        self.ranks = list(layer.stacks)
        import transformers

        # As small as its experts allow. Experts of other families run the same code.
        config = transformers.Qwen3MoeConfig(
            hidden_size=layer.model.hidden,
            moe_intermediate_size=layer.model.intermediate,
            num_experts=layer.model.experts,
            num_experts_per_tok=layer.model.top_k,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=8,
        )
        with torch.device("meta"):  # attention and embeddings are never run
            self.model = transformers.Qwen3MoeForCausalLM(config).eval()
        self.experts = self.model.model.layers[0].mlp.experts
        w13, w2 = layer.tensors
        self.experts.gate_up_proj = nn.Parameter(w13, requires_grad=False)
        self.experts.down_proj = nn.Parameter(w2, requires_grad=False)
        self.peft: PeftModel | None = None
        for rank, factors in layer.stacks.items():
            self.add_adapters(rank, factors)

    def add_adapters(self, rank: int, factors: Factors) -> None:
        """Adapters "<rank>-0", "<rank>-1", ... in PEFT's own layout; scaling 1."""
        import peft

        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        for i in range(factors.a2.shape[0]):
            options: dict[str, Any] = {"target_modules": [], "target_parameters": targets}
            config = peft.LoraConfig(r=rank, lora_alpha=rank, **options)
            adapter = f"{rank}-{i}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
                if self.peft is None:
                    self.peft = peft.get_peft_model(
                        self.model, config, adapter, low_cpu_mem_usage=True
                    )
                else:
                    self.peft.add_adapter(adapter, config, low_cpu_mem_usage=True)
            down = self.model.model.layers[0].mlp.experts
            b13 = torch.cat([b[i] for b in factors.b13], dim=1)
            self.fill(down.base_layer, "gate_up_proj", adapter, factors.a13[0][i], b13)
            self.fill(down, "down_proj", adapter, factors.a2[i], factors.b2[i])

    @staticmethod
    def fill(wrapper: Any, parameter: str, adapter: str, a: Tensor, b: Tensor) -> None:
        """a [E, R, in] and b [E, out, R] as PEFT's (R * E, in), expert slow, and (out, R * E),
        expert fast."""
        assert wrapper.parameter_name == parameter
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        wrapper.lora_A[adapter].weight = nn.Parameter(a, requires_grad=False)
        wrapper.lora_B[adapter].weight = nn.Parameter(b, requires_grad=False)

    def base(self, batch: Batch, implementation: str) -> Tensor:
        """The layer without adapters."""
        self.model.set_experts_implementation(implementation)
        return self.experts(batch.x, batch.topk_ids, batch.topk_weights)

    def run(
        self, batch: Batch, implementation: str, rank: int, patience_s: float | None = None
    ) -> Tensor:
        """The layer, adapter by adapter. Raises TooSlow once `patience_s` is out of reach."""
        self.model.set_experts_implementation(implementation)
        wrapped = self.model.model.layers[0].mlp.experts
        out = torch.empty_like(batch.x)
        adapters = batch.mapping.unique().tolist()
        started = time.perf_counter()
        for done, adapter in enumerate(adapters, 1):
            rows = (batch.mapping == adapter).nonzero().squeeze(1)
            experts = self.experts if adapter < 0 else wrapped
            if adapter >= 0:
                assert self.peft is not None
                self.peft.set_adapter(f"{rank}-{adapter}", inference_mode=True)
            out[rows] = experts(batch.x[rows], batch.topk_ids[rows], batch.topk_weights[rows])
            synchronize(out)
            estimate = (time.perf_counter() - started) / done * len(adapters)
            if patience_s is not None and estimate > patience_s:
                raise TooSlow(f"about {estimate:.1f} s a call, {len(adapters)} adapters in turn")
        return out

    def first(self, batch: Batch, implementation: str, rank: int, patience_s: float) -> Tensor:
        """The layer; raises Skipped if batched_mm would gather more weights than fit."""
        rows = int(batch.mapping.unique(return_counts=True)[1].max()) * batch.topk_ids.shape[1]
        copied = rows * self.experts.gate_up_proj[0].nbytes
        if implementation == "batched_mm" and copied > COPY_LIMIT:
            raise Skipped(f"gathers {copied / 1e9:.0f} GB of weights for one adapter")
        return self.run(batch, implementation, rank, patience_s)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        runs = {("grouped_mm_base", 0): Run(on(batches, self.base, "grouped_mm"), eager=True)}
        for rank, how in product(self.ranks, IMPLEMENTATIONS):
            first = partial(self.first, batches[0], how, rank)
            runs[f"{how}_peft", rank] = Run(on(batches, self.run, how, rank), first, eager=True)
        return runs
