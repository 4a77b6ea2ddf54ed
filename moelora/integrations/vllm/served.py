"""Common part of the experts classes that run vLLM's layers in moelora."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelora.integrations import reason_against_device
from moelora.integrations.vllm import (
    OWN_PATH,
    UNEXPECTED,
    deltas,
    race,
    say_once,
    say_served,
    unexpected,
)

# Maps MoEActivation to moelora's names. vLLM's "gelu" is exact, moelora's is the tanh
# approximation.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_tanh": "gelu",
    "swigluoai": "swigluoai",
    "swigluoai_uninterleave": "swigluoai_uninterleave",
    "relu2_no_mul": "relu2",
    "situ": "situ",
    "swiglustep": "swiglustep",
}

IN_HOST_MEMORY = "the expert weights are in host memory"


class Call(NamedTuple):
    """Parameters of a layer's `apply`, by vLLM's names and in its order."""

    output: Tensor
    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    activation: Any
    global_num_experts: int
    expert_map: Tensor | None
    a1q_scale: Tensor | None
    a2_scale: Tensor | None
    workspace13: Tensor
    workspace2: Tensor
    expert_tokens_meta: Any
    apply_router_weight_on_input: bool


_Base: Any = object  # one of vLLM's classes comes after it


class Served(_Base):  # type: ignore[misc]
    """Common part of the experts classes that run in moelora: `apply` calls `_serve`, or vLLM's own
    path where moelora does not support the layer."""

    _lora_context: Any = None

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._reasons: dict[Any, str | None] = {}  # by activation
        self._refusal: str | None = None  # of the operator
        self._of: dict[str, Any] | None = None  # what its table of times is of
        self._table = race.Table()

    def _serve(self, call: Call) -> None:
        """Write `call.output`; ValueError or NotImplementedError, before anything is written, if
        the operator refuses."""
        raise NotImplementedError

    def reason_against(self, activation: Any) -> str | None:
        """Why a layer like this runs vLLM's own path, as far as known without its tensors."""
        if getattr(self, "post_gemm2_hook", None) is not None:
            return "the rows before the weighted sum are wanted"
        if activation not in self._reasons:
            try:
                self._reasons[activation] = self._find_reason(activation)
            except Exception as error:
                self._reasons[activation] = unexpected(error)
        return self._reasons[activation]

    def _find_reason(self, activation: Any) -> str | None:
        if reason := reason_against_device():
            return reason
        ctx = self._lora_context
        dtype = quantization(self)
        if dtype is not None:
            return f"the base is quantized ({dtype})"
        if activation.value not in ACTIVATIONS:
            return f"there is no activation {activation.value!r}"
        try:
            self._activation(activation)
        except ValueError as reason:
            return str(reason)
        if ctx is not None and ctx.fully_sharded:
            return "the adapters are fully sharded"
        if ctx is not None and self._interleaved(activation) and len(ctx.w13_lora_a_stacked) > 1:
            return "gate and up have adapters of their own, while their weights are interleaved"
        return None

    def _interleaved(self, activation: Any) -> bool:
        """Whether gate and up rows of w13 alternate."""
        return bool(activation.value == "swigluoai")

    def _activation(self, activation: Any) -> dict[str, Any]:
        """The activation as arguments of the operator; ValueError if it is unsupported.

        vLLM's "swigluoai" always has the parameters of gpt-oss, and its "swiglustep" a limit of 7;
        others use the clamp of the quantization config, or else of the layer. Those of "situ" are
        the layer's; without a linear beta, or one that is not positive, up has no cap.
        """
        name, quant, moe = activation.value, self.quant_config, self.moe_config
        if name == "situ":
            beta = getattr(moe, "activation_situ_beta", None)
            if beta is None or not beta > 0:
                raise ValueError(f"situ has beta {beta}")
            linear_beta = getattr(moe, "activation_situ_linear_beta", None)
            limit = None if linear_beta is None or not linear_beta > 0 else linear_beta
            return {"activation": name, "activation_alpha": beta, "activation_limit": limit}
        if name == "swigluoai":
            return {"activation": name if self._interleaved(activation) else f"{name}_uninterleave"}
        if name not in ("silu", "swigluoai_uninterleave"):
            return {"activation": ACTIVATIONS[name]}
        limit = first(quant.gemm1_clamp_limit, moe.swiglu_limit)
        if limit is not None and not limit > 0:
            raise ValueError(f"the limit of {name} is {limit}")
        if name == "silu":
            return {"activation": name, "activation_limit": limit}
        alpha = first(quant.gemm1_alpha, moe.swiglu_alpha)
        beta = first(quant.gemm1_beta, moe.swiglu_beta)
        if (alpha, beta) == (1, 0):  # g sigmoid(alpha g) (u + beta)
            return {"activation": "silu", "activation_limit": limit}
        if limit is None or alpha is None or beta != 1:
            raise ValueError(f"{name} has limit {limit}, alpha {alpha} and beta {beta}")
        return {"activation": name, "activation_alpha": alpha, "activation_limit": limit}

    def workspace_shapes(self, *problem: Any) -> tuple[tuple[int, ...], ...]:
        """Only the output of vLLM's workspace is used: the operator's workspace comes from torch's
        pool.
        """
        activation = problem[-1]
        shapes = super().workspace_shapes(*problem)
        if self.reason_against(activation) or self._may_leave(problem[0]):
            return shapes
        return (0,), (0,), shapes[2]

    def apply(self, *args: Any, **named: Any) -> None:
        """Takes the fields of `Call`."""
        call = Call(*args, **named)
        reason = self.reason_against(call.activation)
        if reason is None and self._refusal is None:
            if not self._is_ours(call):
                return self._theirs(call)
            self._refusal = self._try(call)
            if self._refusal is None:
                return
        self._step_aside(str(reason or self._refusal))
        super().apply(*(self._with_workspaces(call) if reason is None else call))

    # -- where both are timed (race.py) --

    def _identity(self, call: Call) -> dict[str, Any] | None:
        """What a table of times is of; None if vLLM's side cannot be timed here."""
        return None

    def _has_adapters(self, call: Call) -> bool:
        """Whether tokens of the call have adapters."""
        return False

    def _sides(self, call: Call, tokens: int, adapters: bool) -> race.Sides:
        """Both sides for the first tokens of a call."""
        raise NotImplementedError

    def _is_ours(self, call: Call) -> bool:
        """Whether moelora runs a call that it could run: where it races, if it won."""
        if not race.is_on():
            return True
        if self._of is None:
            self._of = self._identity(call)
            if self._of is None:
                say_once(f"{type(self).__name__} is not timed on this card; {OWN_PATH}")
                return False
            self._table = race.table(self._of)
        tokens, has = call.hidden_states.size(0), self._has_adapters(call)
        states = (False, True) if has else (False,)
        sides = functools.partial(self._sides, call)
        race.race(self._of, self._table, tokens, states, sides)
        return self._table.is_ours(tokens, has)

    def _may_leave(self, tokens: int) -> bool:
        """Whether a call of so many tokens may run vLLM's own path."""
        if not race.is_on():
            return False
        return not all(self._table.is_ours(tokens, has) for has in (False, True))

    def _theirs(self, call: Call) -> None:
        """Run vLLM's own path and its own adapters."""
        with deltas.left():
            super().apply(*self._with_workspaces(call))

    def _with_workspaces(self, call: Call) -> Call:
        """A call with workspaces of vLLM's own path, where `workspace_shapes` promised none."""
        _, *problem = self.moe_problem_size(call.hidden_states, call.w1, call.w2, call.topk_ids)
        experts = call.global_num_experts, call.w1.size(0), call.expert_tokens_meta
        shapes = super().workspace_shapes(*problem, *experts, call.activation)
        given = call.workspace13, call.workspace2
        if all(w.shape == torch.Size(s) for w, s in zip(given, shapes[:2], strict=True)):
            return call
        first, second = (call.hidden_states.new_empty(shape) for shape in shapes[:2])
        return call._replace(workspace13=first, workspace2=second)

    def _try(self, call: Call) -> str | None:
        """Write `call.output`, or return why not, before anything is written."""
        if is_in_host_memory(call.w1, call.w2):
            return IN_HOST_MEMORY
        try:
            self._serve(call)
        except (ValueError, NotImplementedError) as refusal:
            return str(refusal)
        except UNEXPECTED as error:  # nothing is launched yet
            return unexpected(error)
        say_served()
        return None

    def _step_aside(self, reason: str) -> None:
        say_once(f"{reason}; {OWN_PATH}")


def is_in_host_memory(*weights: Any) -> bool:
    """Whether vLLM has offloaded any of a layer's weights."""
    return any(getattr(weight, "_vllm_is_uva_offloaded", False) for weight in weights)


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def quantization(experts: Any) -> str | torch.dtype | None:
    """Quantized dtype of weights or activations; None for an unquantized layer."""
    return experts.quant_config.weight_quant_dtype or experts.quant_config.quant_dtype
