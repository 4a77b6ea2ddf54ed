"""One MoE layer of a model, shared by all baselines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from moelora.bench import cases
from moelora.bench.shapes import Model
from moelora.reference.fp8 import numbers_of
from moelora.weights.quantized import QuantizedWeights


class Layer:
    """Weights and adapters of one model in one dtype, shared by all baselines.

    `same_a`: gate and up have equal (but separate) shrink factors, since PEFT's `target_parameters`
    cannot represent others.
    """

    w13: torch.Tensor | QuantizedWeights
    w2: torch.Tensor | QuantizedWeights
    b13: torch.Tensor | None
    b2: torch.Tensor | None

    def __init__(
        self,
        model: Model,
        dtype: str,
        ranks: Iterable[int],
        adapters: int,
        generator: torch.Generator,
        same_a: bool = False,
    ):
        self.model, self.dtype, self.adapters = model, dtype, adapters
        self.device = generator.device
        torch_dtype = cases.DTYPES[dtype]
        self.checkpoint: cases.Checkpoint = {}  # source of quantized weights
        if model.format:
            self.checkpoint = cases.draw_checkpoint(model, generator, torch_dtype)
            self.w13, self.w2 = cases.pack_checkpoint(model, self.checkpoint, torch_dtype)
        else:
            self.w13, self.w2 = cases.draw_weights(model, generator, torch_dtype)
        self.b13, self.b2 = cases.draw_biases(model, generator, torch_dtype)
        self.stacks = {
            rank: cases.draw_factors(model, adapters, rank, generator, torch_dtype)
            for rank in ranks
        }
        if same_a:
            for factors in self.stacks.values():
                for a in factors.a13[1:]:
                    a.copy_(factors.a13[0])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 of a layer that is not quantized."""
        assert isinstance(self.w13, torch.Tensor) and isinstance(self.w2, torch.Tensor)
        return self.w13, self.w2

    def weights_of(self, projection: str, expert: int) -> torch.Tensor:
        """One expert's "w13" or "w2" [N, K], dequantized."""
        w = getattr(self, projection)
        if isinstance(w, torch.Tensor):
            return w[expert]
        alone = replace(w, data=w.data[expert : expert + 1], shape=torch.Size((1, *w.shape[1:])))
        return numbers_of(alone)[0].to(self.device)
