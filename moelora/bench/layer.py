"""One MoE layer of a model, shared by all baselines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moelora.bench.cases import DTYPES, normal
from moelora.bench.formats import FORMATS
from moelora.bench.shapes import Model
from moelora.reference.fp8 import numbers_of
from moelora.weights.quantized import QuantizedWeights


@dataclass
class Factors:
    """Stacked adapters of one layer, as vLLM stacks them (gate and up apart)."""

    a13: list[Tensor]  # slices x [L, E, R, K]
    b13: list[Tensor]  # slices x [L, E, I, R]
    a2: Tensor  # [L, E, R, I]
    b2: Tensor  # [L, E, K, R]


class Layer:
    """Random weights and adapters of one model in one dtype.

    `same_a`: gate and up have equal (but separate) shrink factors, since PEFT's `target_parameters`
    cannot represent others.
    """

    w13: Tensor | QuantizedWeights  # [E, 2I, K]; [E, I, K] without a gate
    w2: Tensor | QuantizedWeights  # [E, K, I]
    b13: Tensor | None  # [E, 2I] or [E, I]
    b2: Tensor | None  # [E, K]
    stacks: dict[int, Factors]  # by rank

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
        native = DTYPES[dtype]
        e, k, i, slices = model.experts, model.hidden, model.intermediate, model.slices

        def draw(*shape: int) -> Tensor:
            return normal(shape, 0.02, generator, native)

        self.checkpoint: dict[str, tuple[Tensor, ...]] = {}  # source of quantized "w13" and "w2"
        if model.format:
            format = FORMATS[model.format]
            for name, n, columns in (("w13", slices * i, k), ("w2", k, i)):
                self.checkpoint[name] = format.draw(e, n, columns, generator, native)
            w13, w2 = self.checkpoint.values()
            self.w13 = format.pack(*w13, gate_up=model.gate_up, dtype=native)
            self.w2 = format.pack(*w2, dtype=native)
        else:
            self.w13, self.w2 = draw(e, slices * i, k), draw(e, k, i)
        self.b13, self.b2 = (draw(e, slices * i), draw(e, k)) if model.bias else (None, None)
        self.stacks = {
            r: Factors(
                [draw(adapters, e, r, k) for _ in range(slices)],
                [draw(adapters, e, i, r) for _ in range(slices)],
                draw(adapters, e, r, i),
                draw(adapters, e, k, r),
            )
            for r in ranks
        }
        for factors in self.stacks.values() if same_a else ():
            for a in factors.a13[1:]:
                a.copy_(factors.a13[0])

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """w13 and w2 of a layer that is not quantized."""
        assert isinstance(self.w13, Tensor) and isinstance(self.w2, Tensor)
        return self.w13, self.w2

    def weights_of(self, projection: str, expert: int) -> Tensor:
        """One expert's "w13" or "w2" [N, K], dequantized."""
        w = getattr(self, projection)
        if isinstance(w, Tensor):
            return w[expert]
        alone = replace(w, data=w.data[expert : expert + 1], shape=torch.Size((1, *w.shape[1:])))
        return numbers_of(alone)[0].to(self.device)
