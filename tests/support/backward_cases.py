"""The operators that train: a layer, its projections, and the deltas of their adapters alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from cases import Problem, Spec
from delta_cases import DELTAS, delta_kwargs
from gradient_cases import FACTORS as FACTORS_OF_LAYER
from gradient_cases import by_autograd, flat, grad_like, on_cpu
from torch import Tensor

import moelora
from moelora import ProjectionGradients
from moelora.reference import fused_moe_lora_gemm_backward_ref, naive_fused_moe_lora_gemm_backward

FACTORS = ("lora_a", "lora_b")


@dataclass(frozen=True)
class Operator:
    kind: str  # layer, projection or delta
    projection: str | None = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kind, self.projection)))

    @property
    def x(self) -> str:
        return "hidden_states" if self.kind == "layer" else "x"

    @property
    def factors(self) -> tuple[str, ...]:
        return FACTORS_OF_LAYER if self.kind == "layer" else FACTORS

    @property
    def gradients(self) -> type:
        return moelora.Gradients if self.kind == "layer" else ProjectionGradients

    def arguments(self, p: Problem, mul: bool = True) -> dict:
        if self.kind == "layer":
            return p.kwargs()
        if self.kind == "projection":
            return p.gemm_kwargs(self.projection, mul)
        return delta_kwargs(p, self.projection, mul_routed_weight=mul)

    def problem(self, spec: Spec, place, mul: bool = True, seed: int = 1) -> tuple[dict, Tensor]:
        """(arguments, gradient of the result) on a device, in a dtype."""
        device, dtype = place
        p = replace(spec, dtype=dtype).build().to(device)
        shape = p.hidden_states.shape
        if self.kind != "layer":
            shape = (*p.topk_ids.shape, getattr(p, self.projection).size(1))
        return self.arguments(p, mul), grad_like(shape, dtype, device, seed)

    def __call__(self, **arguments) -> Tensor:
        if self.kind == "layer":
            return moelora.fused_experts_lora(**arguments)
        if self.kind == "projection":
            return moelora.fused_moe_lora_gemm(**arguments)
        return DELTAS[self.projection](**arguments)

    def backward(self, arguments: dict, grad_out: Tensor, **options):
        if self.kind == "layer":
            _, saved = moelora.fused_experts_lora_saving(**arguments)
            return moelora.fused_experts_lora_backward(grad_out, saved, **arguments, **options)
        if self.kind == "projection":
            return moelora.fused_moe_lora_gemm_backward(grad_out, **arguments, **options)
        return moelora.moe_lora_delta_backward(grad_out, **arguments, **options)

    def by_hand(self, arguments: dict, grad_out: Tensor, **options) -> dict[str, Tensor]:
        return flat(self.backward(arguments, grad_out, **options)._asdict())

    def by_autograd(self, arguments: dict, grad_out: Tensor) -> dict[str, Tensor]:
        return by_autograd(arguments, grad_out, function=self)

    def samples(self, grads: dict, arguments: dict, grad_out: Tensor) -> dict:
        """What `assert_samples` takes, of a projection, or of a delta: one of weights of zero."""
        arguments, grad_out = on_cpu(arguments), grad_out.cpu()
        if self.kind == "delta":
            x, experts = arguments["x"], arguments.pop("num_experts")
            arguments["w"] = x.new_zeros(experts, grad_out.size(-1), x.size(-1))
        want = flat(fused_moe_lora_gemm_backward_ref(grad_out, **arguments))
        naive = flat(naive_fused_moe_lora_gemm_backward(grad_out, **arguments))
        assert set(grads) == set(want)
        return {n: (grads[n], want[n], naive[n].double()) for n in want}


LAYER = Operator("layer")
PROJECTIONS, DELTA_OPERATORS = (
    [Operator(kind, projection) for projection in DELTAS] for kind in ("projection", "delta")
)
WITHOUT_LAYER = [*PROJECTIONS, *DELTA_OPERATORS]
OPERATORS = [LAYER, *WITHOUT_LAYER]
KINDS = [LAYER, Operator("projection", "w2"), Operator("delta", "w2")]


def each(operators: list[Operator]):
    return pytest.mark.parametrize("operator", operators, ids=str)


def converted(value, convert):
    return [convert(v) for v in value] if isinstance(value, list) else convert(value)


def with_factors(arguments: dict, convert) -> dict:
    names = [n for n in arguments if n.endswith(FACTORS)]
    return arguments | {name: converted(arguments[name], convert) for name in names}


# Of gradients of the pairs of expert and adapter that tokens reach.
SPARSE = Spec(tokens=9, top_k=2, experts=5, hidden=72, inter=40, ranks=(8, 3, 16), mix="many")
SPARSE_SPECS = {
    "per_expert": SPARSE,
    "outer": replace(SPARSE, sharing="outer", slices=1),
    "remote": replace(SPARSE, remote=2, routing="out_of_range"),
    "long": replace(SPARSE, tokens=40, experts=2),
    "no_rows": replace(SPARSE, tokens=0),
}
