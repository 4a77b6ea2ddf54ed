"""Pack FP8 experts that transformers has loaded (`FP8Experts`).

`from_pretrained` of an FP8 checkpoint on a GPU creates one e4m3 tensor for all experts of a layer,
and one of scales. `pack_loaded` packs both into tiles, by the scheme that also reads them from a
folder. Such modules have an experts interface of their own; "moelora" is registered there, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

from moelora.adapters import MoELayer
from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.experts import activation_of, experts_forward
from moelora.integrations.transformers.floats import fp8
from moelora.integrations.transformers.projection import (
    Experts,
    is_loaded_fp8,
    is_quantized,
    not_packed,
    set_weights,
    up_name,
)
from moelora.integrations.transformers.quantizer import refuse_saving
from moelora.integrations.transformers.scheme import Scheme
from moelora.operators.checks import errors_about
from moelora.operators.fake import COMPUTE_DTYPES
from moelora.weights import QuantizedWeights
from moelora.weights.fp8 import Activations, largest_scale, read_block, read_tensor
from moelora.weights.readers import GateUp

OTHER_LAYOUTS = ("deepgemm_megamoe",)  # rearranges weights on first call


def fp8_experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` of packed FP8 experts; raises RuntimeError if they are not packed."""
    if not is_quantized(self):
        raise RuntimeError(not_packed(type(self).__name__))
    return experts_forward(self, hidden_states, top_k_index, top_k_weights)


@torch.no_grad()
def pack_loaded(
    model: PreTrainedModel,
    layers: Mapping[str, tuple[Experts, MoELayer]],
    activations: Activations | None = None,
) -> None:
    """Packs `layers` that transformers has loaded in FP8, and runs them in moelora.

    Checks everything before changing anything. Then it packs one layer after the other on its
    device and frees its parameters: additional memory is limited to the tiles of one layer and one
    expert. A layer is packed completely or not at all, so that a call that ran out of memory can be
    repeated.

    Raises
    ------
    NotImplementedError
        moelora cannot run these experts; the message names the layer and why.
    ValueError
        A weight is NaN, a scale is out of the format's range, or `activations` is given without an
        FP8 layer.
    """
    loaded = {name: module for name, (module, _) in layers.items() if is_loaded_fp8(module)}
    if not loaded:
        if activations is not None:
            raise ValueError(
                f"activations is {activations!r}, wanted None: {type(model).__name__} has no "
                "experts of FP8 that are still to be packed"
            )
        return
    dtype = _dtype(model)
    for name, module in loaded.items():
        _check(name, module)
    for name, module in loaded.items():
        up, down = (
            _packed(name, module, own, activations, dtype) for own in (up_name(module), "down_proj")
        )
        refuse_saving(model)
        set_weights(module, (up, down))
    model.set_experts_implementation(IMPLEMENTATION)


def _packed(
    name: str, experts: Experts, own: str, activations: Activations | None, dtype: torch.dtype
) -> QuantizedWeights:
    scheme = _scheme(experts).taking(activations)
    found = _tensors(experts, own, scheme)
    return scheme.pack(f"{name}.{own}", found, _gate_up(experts, own), dtype)


def _check(name: str, experts: Experts) -> None:
    implementation = experts.config._experts_implementation
    if implementation in OTHER_LAYOUTS:
        raise NotImplementedError(
            f"{name} is loaded for experts_implementation={implementation!r}, which lays weights "
            "out in its own way; load the model with another"
        )
    if experts.block_size and experts.activation_scheme == "static":
        raise NotImplementedError(
            f"{name} has blocks and activation_scheme='static', wanted 'dynamic' with blocks"
        )
    for own in (up_name(experts), "down_proj"):
        weight = getattr(experts, own)
        if weight.dtype != torch.float8_e4m3fn or weight.is_meta:
            got = "is on the meta device" if weight.is_meta else f"is {weight.dtype}"
            raise NotImplementedError(f"{name}.{own} {got}, wanted torch.float8_e4m3fn in memory")
        with errors_about(f"{name}.{own}", ValueError):
            _check_numbers(experts, own)
    with errors_about(name, NotImplementedError):
        activation_of(experts)


def _check_numbers(experts: Experts, own: str) -> None:
    """Raises what packing would raise later, when some layers are already packed."""
    scheme, gate_up = _scheme(experts), _gate_up(experts, own)
    found = _tensors(experts, own, scheme)
    if "block" in scheme.options:
        block = scheme.options["block"]
        checkpoint = read_block(found["weight"], found["weight_scale_inv"], block, gate_up)
    else:
        checkpoint = read_tensor(found["weight"], found["weight_scale"], gate_up)
        if "input_scale" in found:
            largest_scale(found["input_scale"])
    for expert in range(checkpoint.shape[0]):
        checkpoint.read(expert)


def _scheme(experts: Experts) -> Scheme:
    settings = {
        "weight_block_size": experts.block_size,
        "activation_scheme": experts.activation_scheme,
    }
    return fp8(settings)


def _tensors(experts: Experts, own: str, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of one projection, by their names in a folder."""
    found = {"weight": getattr(experts, own)}
    scales = getattr(experts, f"{own}_scale_inv")
    if "weight_scale_inv" in scheme.required:
        found["weight_scale_inv"] = scales
    else:
        found["weight_scale"] = scales.flatten(1)  # (E, 1, 1), or (E, 2, 1) for gate and up
    if "input_scale" in scheme.required:  # same name without a gate
        name = "down_proj" if own == "down_proj" else "gate_up_proj"
        found["input_scale"] = getattr(experts, f"{name}_activation_scale")
    return {name: tensor.detach() for name, tensor in found.items()}


def _gate_up(experts: Experts, own: str) -> GateUp | None:
    return "concatenated" if experts.has_gate and own != "down_proj" else None


def _dtype(model: nn.Module) -> torch.dtype:
    """Dtype of activations: that of the model's first weight that is not FP8."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1)
    dtype = next(dtypes, None)
    if dtype not in COMPUTE_DTYPES:
        raise NotImplementedError(
            f"{type(model).__name__} is {dtype} beside its experts of FP8, wanted torch.bfloat16 "
            "or torch.float16; pass dtype= to from_pretrained"
        )
    return dtype


ALL_FP8_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, fp8_experts_forward)
