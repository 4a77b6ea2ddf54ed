"""`fused_experts_lora` as an experts function of transformers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from itertools import product
from typing import Any, TypeAlias

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.linears import device_of
from moelora.integrations.transformers.projection import (
    Experts,
    expert_weights,
    is_interleaved,
    is_loaded_fp8,
    is_quantized,
    refuse_fsdp1,
    up_name,
)
from moelora.operators import experts as ops
from moelora.reference import activate


def experts_forward(
    self: Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    adapters: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """`fused_experts_lora` with the signature of transformers' experts functions.

    `self` is the experts module; `adapters` are the adapter arguments of the operator; None: those
    of the current pass. Ids out of range, as expert parallelism uses them for experts of other
    ranks, are skipped. Raises NotImplementedError for a module that computes something else.
    """
    activation, alpha, limit = activation_of(self)
    w13, w2 = weights_of(self)
    up_bias, down_bias = biases_of(self, w13.dtype)
    if torch.is_grad_enabled():
        _refuse_gradients(self, w13, w2)

    if adapters is None:
        serving = getattr(self, "_moelora", None)
        adapters = {} if serving is None else serving.adapters(self._moelora_layer, hidden_states)
    out = ops.fused_experts_lora(
        hidden_states.to(w13.dtype),
        w13,
        w2,
        top_k_weights.to(torch.float32),
        top_k_index,
        w13_bias=up_bias,
        w2_bias=down_bias,
        activation=activation,
        activation_alpha=alpha,
        activation_limit=limit,
        **adapters,
    )
    return out.to(hidden_states.dtype)


def weights_of(experts: Experts) -> tuple[ops.Weights, ops.Weights]:
    """w13 (E, 2I, K) and w2 (E, K, I), whose memory is that of the module."""
    if not experts.is_transposed or is_quantized(experts):
        return expert_weights(experts)
    lay_out(experts)
    # Weights computed per call (PEFT's parametrizations) are no parameters, and are copied.
    weights = getattr(experts, up_name(experts)), experts.down_proj
    up, down = (w.transpose(1, 2).contiguous() for w in weights)
    return up, down


def biases_of(
    experts: Experts, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of w13 and w2; None without."""
    if not getattr(experts, "has_bias", False):
        return None, None
    up: torch.Tensor = getattr(experts, f"{up_name(experts)}_bias")
    return up.to(dtype), experts.down_proj_bias.to(dtype)


def _refuse_gradients(experts: Experts, *weights: ops.Weights) -> None:
    for name, weight in zip((up_name(experts), "down_proj"), weights, strict=True):
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            refuse_fsdp1(experts, name)
            raise RuntimeError(
                f"{type(experts).__name__}.{name} requires a gradient, which "
                'experts_implementation="moelora" never computes: call the model under '
                "torch.no_grad(), or freeze the experts' weights, as PEFT and "
                "moelora.integrations.transformers.enable(model, training=True) do"
            )


# Name, alpha and limit, as arguments of fused_experts_lora.
Activation: TypeAlias = tuple[ops.Activation, float | None, float | None]

_activations: weakref.WeakKeyDictionary[Experts, Activation] = weakref.WeakKeyDictionary()
LIMITS = ("limit", "swiglu_limit")
ALPHAS = ("alpha", "swiglu_alpha")
# Those of SiTU: of Kimi-K3's config and of Inkling-2's, bounds of gate and of up.
GATE_CAPS = ("activation_situ_beta", "mlp_gate_softcap")
UP_CAPS = ("activation_situ_linear_beta", "mlp_up_softcap")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # of torch
def activation_of(experts: Experts) -> Activation:
    """The activation of `experts`, as arguments of `fused_experts_lora`.

    Names of classes and configs do not determine what `_apply_gate` computes (clamps, offsets,
    layout). So the function is evaluated once per module, and compared with every activation of
    moelora, using the constants of the module or its config.
    """
    known = _activations.get(experts)
    if known is None:
        known = _activations[experts] = _identify(experts)
    return known


@torch.no_grad()
def _identify(experts: Experts) -> Activation:
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{name} normalizes every expert's output before it is weighted "
            "(has_post_expert_norm), which moelora has not. Leave experts_implementation at "
            '"eager" or "grouped_mm" for this model'
        )
    up, down = expert_weights(experts)
    stored = ((up_name(experts), up), ("down_proj", down))
    for parameter, weight in () if is_loaded_fp8(experts) else stored:  # FP8 is not packed yet
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"{name}.{parameter} is {weight.dtype}, which moelora does not support"
            )

    numbers = {names: _numbers(experts, names) for names in (LIMITS, ALPHAS, GATE_CAPS, UP_CAPS)}
    edges = [*numbers[LIMITS], *numbers[GATE_CAPS], *numbers[UP_CAPS]]
    gate, up = (t.to(device_of(experts)) for t in _samples(edges))
    # Rounding of modules that compute in float32, and cancellation in forms of gelu.
    loss = 1e-6 * (gate.abs().clamp(max=50) * up.abs().clamp(max=50))
    w13 = torch.cat([gate, up], dim=-1) if experts.has_gate else gate
    got = experts._apply_gate(w13) if experts.has_gate else experts.act_fn(w13)
    candidates = _candidates(experts, *numbers.values())
    for activation in candidates:
        wanted = activate(w13, *activation)
        if got.shape == wanted.shape and ((got - wanted).abs() <= 1e-6 * wanted.abs() + loss).all():
            return activation
    layout = "" if not experts.has_gate else " of its gate"
    act = getattr(experts, "act_fn", None)
    tried = ", ".join(dict.fromkeys(activation for activation, *_ in candidates))
    raise NotImplementedError(
        f"the activation{layout} of {name} ({type(experts)._apply_gate.__qualname__}, "
        f"act_fn={type(act).__name__}) is none of moelora's: {tried}"
    )


def _numbers(experts: Experts, names: tuple[str, ...]) -> list[float]:
    """Valid values of attributes `names` of the module or its config."""
    places = experts, getattr(experts, "config", None)
    found = [getattr(place, name, None) for place in places for name in names]
    numbers = [float(n) for n in found if isinstance(n, int | float)]
    float32 = torch.finfo(torch.float32)
    return list(dict.fromkeys(n for n in numbers if float32.tiny <= n <= float32.max))


def _samples(limits: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample values of gate and up, float64 (n, 1): dense where variants of gelu differ, on both
    sides of each limit, and large enough to reveal clamps with unknown limits."""
    edges = [part * limit for limit in limits for part in (-2, -1.01, -0.99, 0.99, 1.01, 2)]
    near = [n / 4 for n in range(-24, 25)] + [-50.0, -20.0, -10.0, 10.0, 20.0, 50.0]
    near += [edge for edge in edges if abs(edge) < 1e6]
    far = edges + [sign * 10.0**n for n in range(2, 39) for sign in (-1, 1)]
    ones = (-1.0, 1.0)
    pairs = [*product(near, near), *product(far, ones), *product(ones, far)]
    return torch.tensor(pairs, dtype=torch.float64).split(1, dim=-1)


def _candidates(
    experts: Experts,
    limits: list[float],
    alphas: list[float],
    gate_caps: list[float],
    up_caps: list[float],
) -> list[Activation]:
    """Activations that moelora supports for the layout, default parameters first."""
    if not experts.has_gate:
        return [("relu2", None, None)]
    bounds = (None, *limits)
    pairs = list(product((None, *alphas), bounds))
    if is_interleaved(experts):
        return [("swigluoai", *numbers) for numbers in pairs]
    return [
        *(("silu", None, limit) for limit in bounds),
        ("gelu", None, None),
        *(("swigluoai_uninterleave", *numbers) for numbers in pairs),
        *(("swiglustep", None, limit) for limit in bounds),
        *(("situ", *numbers) for numbers in product((None, *gate_caps), (None, *up_caps))),
    ]


_laying = threading.Lock()


def lay_out(experts: Experts) -> None:
    """Rearranges weights that a module stores as (E, in, out).

    Kernels need contiguous rows of `in` elements. So each parameter's memory is rearranged once to
    (E, out, in), and `parameter.data` becomes a transposed view of it. Parameter, shape and values
    stay the same, only strides change; there is no second copy that could become stale.

    Compilers guard on the strides that they meet first: call this before a traced function reads
    the weights in any other way. Not when adapters are attached: FSDP2 takes only contiguous
    parameters.
    """
    if experts.is_transposed and not is_quantized(experts):
        _lay_out(experts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # of torch
def _lay_out(experts: Experts) -> bool:
    """Rearranges the weights. A compiler calls it while it traces, since graphs depend on strides;
    it wants a constant result."""
    for name in (up_name(experts), "down_proj"):
        with _laying:
            weight: Any = experts._parameters.get(name)
            if hasattr(weight, "placements"):
                if weight.device_mesh.ndim == 1:  # others are FSDP's, which keeps its own
                    experts._parameters[name] = _laid_out_part(weight)
            elif weight is not None and not weight.transpose(1, 2).is_contiguous():
                is_inference = weight.is_inference()  # as the data must be, too
                with torch.inference_mode(is_inference), torch.no_grad():
                    weight.data = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return True


def _laid_out_part(weight: Any) -> torch.nn.Parameter:
    """A DTensor whose part of this process is rearranged; a pass of the model only views it."""
    local = weight.detach().to_local().transpose(1, 2).contiguous().transpose(1, 2)
    whole = type(weight.data).from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return torch.nn.Parameter(whole, requires_grad=weight.requires_grad)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
