"""Run quantized vLLM layers in moelora: hooks on their quantization methods.

A method loads a layer's weights, repacks them for the selected kernels, and creates the kernel
object that the layer calls. The hooks replace the second and third step: loaded tensors are packed
into moelora's tiles, which become the layer's `w13_weight` and `w2_weight`, and the others are
freed. vLLM processes layer after layer, so that the additional memory is at most the tiles of one
layer and one expert in transit.

MXFP4 methods round up a layer's sizes for their kernels in the constructor; whether moelora serves
the layer is decided there, in which case sizes are only rounded to blocks of 32. vLLM may have no
kernels for such a layer, e.g. batch-invariant ones: its exception is deferred until that decision,
and raised if moelora does not serve the layer either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor import utils
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

from moelora.integrations import shown
from moelora.integrations.interface import is_absent
from moelora.integrations.vllm import (
    OWN_PATH,
    UNEXPECTED,
    interface,
    race,
    say_once,
    unexpected,
    wrap,
)
from moelora.integrations.vllm.experts import QuantizedExpertsWithLoRA
from moelora.integrations.vllm.formats import FORMATS, Format, apart, biases
from moelora.integrations.vllm.served import IN_HOST_MEMORY, is_in_host_memory
from moelora.operators.fake import COMPUTE_DTYPES
from moelora.weights import QuantizedWeights


def install() -> None:
    """Hook the methods that this vLLM has with the expected API; report how others differ."""
    for format in FORMATS.values():
        needed = format.needed
        module = next(iter(needed.replaced))
        cls = next(iter(needed.replaced[module])).partition(".")[0]
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if is_absent(module, error):
                continue  # not in this release
        except Exception:
            pass  # `problem` says why
        if problem := interface.problem(needed):
            say_once(f"{problem}; {OWN_PATH} for layers of {cls}")
            continue
        place = importlib.import_module(module)
        method = getattr(place, cls)
        if format.rounds:
            wrap(method, "__init__", partial(_deciding, cls=method, format=format))
            wrap(place, format.chooses, partial(_choosing, place=place))
        taking_over = partial(_taking_over, cls=method, format=format)
        wrap(method, "process_weights_after_loading", taking_over)


def _config(layer: Any, w13_bias: Any = None, w2_bias: Any = None) -> Any:
    """Configuration of an unquantized layer, as vLLM sees it, including activation parameters."""
    return biased_moe_quant_config(
        w13_bias,
        w2_bias,
        gemm1_alpha=getattr(layer, "swiglu_alpha", None),
        gemm1_beta=getattr(layer, "swiglu_beta", None),
        gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
    )


def _reason(method: Any, layer: Any, format: Format) -> str | None:
    """Why a layer stays with vLLM, without looking at its weights. `layer` may be None yet."""
    try:
        return _find_reason(method, layer, format)
    except Exception as error:
        return unexpected(error)


def _find_reason(method: Any, layer: Any, format: Format) -> str | None:
    moe = method.moe
    parallel = moe.moe_parallel_config
    if not hasattr(method, "experts_cls"):
        return f"{type(method).__name__} of this vLLM has no modular kernel"
    if moe.moe_backend != "auto":
        return f"moe_backend={moe.moe_backend!r} is asked for"
    if moe.in_dtype not in COMPUTE_DTYPES:
        return f"the activations are {moe.in_dtype}"
    if getattr(parallel, "use_batched_activation_format", False):
        return "the all-to-all hands over tokens in batches by expert"
    if not QuantizedExpertsWithLoRA._supports_parallel_config(parallel):
        return f"TritonExperts does not take tokens from the exchange {parallel.all2all_backend}"
    if parallel.enable_eplb:
        return "experts are rearranged (EPLB)"
    if format.interleaved != (moe.activation.value == "swigluoai"):
        order = "interleaved" if format.interleaved else "concatenated"
        return f"{moe.activation.value} with rows of gate and up {order}"
    if reason := format.reason(method):
        return reason
    if getattr(utils, "is_weights_pre_processed", bool)():
        return "the weights come ready for vLLM's kernels"
    weights = () if layer is None else layer.parameters()
    if is_in_host_memory(*weights):
        return IN_HOST_MEMORY
    return QuantizedExpertsWithLoRA(moe, _config(layer)).reason_against(moe.activation)


def _choosing(choose: Callable[..., Any], *args: Any, place: Any, **kwargs: Any) -> Any:
    """vLLM's selection of kernels, which only the `__init__` of `_deciding` calls by that name:
    returns its exception in place of the experts class.
    """
    try:
        return choose(*args, **kwargs)
    except NotImplementedError as refusal:
        return place.Mxfp4MoeBackend.EMULATION, refusal


def _deciding(
    init: Callable[..., Any], self: Any, *args: Any, cls: type[Any], format: Format, **kwargs: Any
) -> None:
    """`__init__` of a method that rounds sizes: stores vLLM's choice in `_moelora_theirs`, and
    restores it if moelora cannot serve the layer.
    """
    init(self, *args, **kwargs)
    if type(self) is not cls or self.experts_cls is None:
        _raise_refusal(self, f"{type(self).__name__} is not known")
        return
    if reason := _reason(self, None, format):
        _raise_refusal(self, reason)
        say_once(f"{reason}; {OWN_PATH}")
        return
    theirs = self.mxfp4_backend, self.experts_cls
    sizes = _rounded(self)
    self.mxfp4_backend = type(self.mxfp4_backend).EMULATION  # rounds up to blocks of 32
    if race.wanted() and not isinstance(theirs[1], Exception) and _rounded(self) != sizes:
        self.mxfp4_backend = theirs[0]
        say_once(f"{format.about} layers of other sizes than vLLM's are not timed; {OWN_PATH}")
        return
    self._moelora_theirs = theirs
    self.experts_cls = QuantizedExpertsWithLoRA


def _rounded(method: Any) -> tuple[int, ...]:
    """The sizes that a layer gets by the method's backend."""
    moe = method.moe
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    if not race.wanted():
        return sizes
    return tuple(method.maybe_roundup_sizes(*sizes, moe.in_dtype, moe.moe_parallel_config))


def _raise_refusal(method: Any, reason: str) -> None:
    """Raise vLLM's exception, deferred by `_choosing`, together with ours."""
    if isinstance(method.experts_cls, NotImplementedError):
        raise method.experts_cls from ValueError(f"moelora: {reason}")


def _give_back(method: Any, layer: Any, reason: str) -> None:
    """Restore vLLM's choice from `_deciding`, if its kernels support the sizes that the layer has
    by now.
    """
    moe = method.moe
    sizes = layer.hidden_size, layer.intermediate_size_per_partition
    method.mxfp4_backend, method.experts_cls = method._moelora_theirs
    _raise_refusal(method, reason)
    wanted = method.maybe_roundup_sizes(*sizes, moe.in_dtype, moe.moe_parallel_config)
    if tuple(wanted) != sizes:
        raise ValueError(
            f"moelora: {reason}, and vLLM's own kernels want the sizes {tuple(wanted)}, not {sizes}"
            "; start vLLM with MOELORA_VLLM=0"
        )


def _taking_over(
    process: Callable[..., Any], self: Any, layer: Any, *, cls: type[Any], format: Format
) -> Any:
    if type(self) is not cls:
        return process(self, layer)
    decided = hasattr(self, "_moelora_theirs")
    if format.rounds and not decided:
        return process(self, layer)
    reason = _reason(self, layer, format)
    try:
        reason = reason or _lost(self, format)
    except UNEXPECTED as error:
        reason = unexpected(error)
    if reason is None:
        try:
            packed = _packed(self, layer, format)
        except (ValueError, NotImplementedError) as refusal:
            reason = str(refusal)
        except Exception as error:
            reason = unexpected(error)
        else:
            if _races(self):
                return _race(process, self, layer, packed, format)
            return _put(self, layer, packed)
    if decided:
        _give_back(self, layer, reason)
    say_once(f"{reason}; {OWN_PATH}")
    return process(self, layer)


def _identity(method: Any, format: Format) -> dict[str, Any]:
    """What a layer's table of times is of."""
    moe = method.moe
    return race.identity(
        format.about,
        experts=(moe.num_experts, moe.num_local_experts, moe.experts_per_token),
        sizes=(moe.hidden_dim, moe.intermediate_size_per_partition),
        dtype=moe.in_dtype,
        activation=moe.activation.value,
    )


def _lost(method: Any, format: Format) -> str | None:
    """Why a layer whose times are known stays with vLLM."""
    if not _races(method):
        return None
    if getattr(method.moe.moe_parallel_config, "dp_size", 1) > 1:
        return f"{format.about} layers of data-parallel ranks are not timed on this card"
    found = race.table(_identity(method, format))
    return f"vLLM is faster on this card ({format.about})" if found.rows and found.loses() else None


def _races(method: Any) -> bool:
    """Not where vLLM has no kernels for the layer."""
    theirs = getattr(method, "_moelora_theirs", (None, None))[1]
    return race.wanted() and not isinstance(theirs, Exception)


def _race(
    process: Callable[..., Any], method: Any, layer: Any, packed: _Packed, format: Format
) -> Any:
    """Give a layer to the faster side. Neither reads the other's tensors, so that all numbers of
    tokens go the same way: to vLLM where moelora is slower at any of them, as no user may lose.

    Adapters do not exist yet, so both are timed without.
    """
    of = _identity(method, format)
    found = race.table(of)
    if found.rows:  # `_lost` has looked at them
        return _put(method, layer, packed)
    if hasattr(method, "_moelora_theirs"):
        _give_back(method, layer, "it races with vLLM")
    try:
        done = process(method, layer)
    except Exception as error:  # of a format that vLLM has no kernels for here
        say_once(f"vLLM's own path fails ({shown(error)}): moelora runs {format.about} layers")
        return _put(method, layer, packed)
    ours = packed.parameters["w13_weight"], packed.parameters["w2_weight"]
    theirs = layer.w13_weight, layer.w2_weight

    def sides(tokens: int, _: bool) -> race.Sides:
        calls = ((packed.kernel, ours), (method.moe_kernel, theirs))
        return race.Sides(*(_call(kernel, method, layer, w, tokens) for kernel, w in calls))

    race.race(of, found, max(race.SIZES), (False,), sides)
    return done if found.loses() else _put(method, layer, packed)


def _call(
    kernel: Any, method: Any, layer: Any, weights: tuple[Tensor, Tensor], tokens: int
) -> Callable[[], None]:
    """A call of a layer's kernel with random tokens, as the layer makes it."""
    moe, device = method.moe, weights[0].device
    draws = torch.Generator(device).manual_seed(0)
    like: Any = {"device": device, "generator": draws}
    experts = getattr(layer, "global_num_experts", moe.num_experts)
    hidden = torch.randn(tokens, layer.hidden_size, **like).to(moe.in_dtype)
    ids = torch.rand(tokens, experts, **like).topk(moe.experts_per_token).indices.int()
    shares = torch.full(ids.shape, 1 / moe.experts_per_token, device=device)
    arguments = {
        "activation": moe.activation,
        "global_num_experts": experts,
        "expert_map": getattr(layer, "expert_map", None),
        "apply_router_weight_on_input": False,
    }

    def call() -> None:
        kernel.apply(hidden, *weights, shares, ids, **arguments)

    return call


def _pairs() -> bool:
    """Whether every adapter has factors for gate and for up, though weights alternate."""
    lora = getattr(get_current_vllm_config_or_none(), "lora_config", None)
    return bool(getattr(lora, "enable_mixed_moe_lora_format", False))


def _read(method: Any, layer: Any, format: Format) -> tuple[QuantizedWeights, QuantizedWeights]:
    gate_up = "interleaved" if format.interleaved and not _pairs() else "concatenated"
    options = {"gate_up": gate_up if method.moe.is_act_and_mul else None}
    options["dtype"] = method.moe.in_dtype
    w13 = format.read(method, layer, "w13", options)
    return w13, format.read(method, layer, "w2", options | {"gate_up": None})


class _Packed(NamedTuple):
    """What takes the place of a layer's parameters, its configuration and its kernel object."""

    parameters: dict[str, nn.Parameter]
    quant_config: Any
    kernel: Any


def _packed(method: Any, layer: Any, format: Format) -> _Packed:
    """Tiles, biases and the kernel that reads them; the layer is unchanged."""
    w13, w2 = _read(method, layer, format)
    bias = biases(format, layer, method.moe.in_dtype)
    if format.interleaved and w13.gate_up == "concatenated" and bias[0] is not None:
        bias = apart(bias[0]), bias[1]
    parts = {"w13_weight": w13.data, "w2_weight": w2.data, "w13_bias": bias[0], "w2_bias": bias[1]}
    parameters = {
        name: nn.Parameter(tensor, requires_grad=False)
        for name, tensor in parts.items()
        if tensor is not None
    }
    config = _config(layer, *(parameters.get(name) for name in ("w13_bias", "w2_bias")))
    prepare_finalize = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    experts = QuantizedExpertsWithLoRA(method.moe, config, w13, w2)
    return _Packed(parameters, config, modular_kernel.FusedMoEKernel(prepare_finalize, experts))


def _put(method: Any, layer: Any, packed: _Packed) -> None:
    """Replace all loaded parameters, and the kernel that reads them."""
    for name in [n for n in layer._parameters if n.startswith(("w13_", "w2_"))]:
        del layer._parameters[name]
    for name, parameter in packed.parameters.items():
        layer.register_parameter(name, parameter)
    method.experts_cls = QuantizedExpertsWithLoRA
    method.moe_quant_config = packed.quant_config
    method.moe_kernel = packed.kernel
