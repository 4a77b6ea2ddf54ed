"""Models that transformers has sharded: by tensors (`tp_plan`), by experts (`ep_size`), or both.

What a process holds of a weight is what its DTensor says on the mesh dimensions "tp" and "ep".
Other dimensions are FSDP's, which gathers weights before they are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import transformers
from torch import nn

from moelora.adapters.layers import MoELayer
from moelora.adapters.ranks import Ranks
from moelora.adapters.shards import Axis, Shard
from moelora.integrations.transformers.projection import Experts, is_loaded_fp8, up_name

_ranks: weakref.WeakKeyDictionary[nn.Module, Ranks] = weakref.WeakKeyDictionary()


def shard_of(weight: object, axes: Sequence[Axis]) -> Shard | None:
    """The part of a weight that this process computes with; None: all of it.

    `axes` names the weight's dimensions.
    """
    placements: Any = getattr(weight, "placements", ())
    mesh: Any = getattr(weight, "device_mesh", None)
    for number, placement in enumerate(placements):
        dimension = (mesh.mesh_dim_names or (None,) * mesh.ndim)[number]
        if dimension in ("tp", "ep") and mesh.size(number) > 1 and hasattr(placement, "dim"):
            axis = axes[placement.dim]
            fused = getattr(placement, "split_factor", 1) if dimension == "tp" else 1
            return Shard(axis, mesh.get_local_rank(number), mesh.size(number), fused)
    return None


def experts_shard(name: str, experts: Experts, layer: MoELayer) -> Shard | None:
    """The part of the experts that this process computes with; None: all of them.

    Raises NotImplementedError for parts that no factors go with.
    """
    axes: tuple[Axis, ...] = ("experts", "intermediate", "in")  # of gate_up_proj
    turned = axes[0], axes[2], axes[1]
    up = shard_of(experts._parameters.get(up_name(experts)), turned if layer.transposed else axes)
    down = shard_of(experts._parameters.get("down_proj"), axes if layer.transposed else turned)
    if up is None and down is None:
        return None
    if is_loaded_fp8(experts):
        raise NotImplementedError(
            f"{name} has FP8 weights of a tensor- or expert-parallel model, which moelora does not "
            "pack; load it with FineGrainedFP8Config(dequantize=True), or in one process"
        )
    fused = 2 if layer.gated and not layer.interleaved else 1
    whole = up is not None and down is not None and up.axis == down.axis
    biased = getattr(experts, "has_bias", False)
    if whole and up is not None and up.axis == "experts":
        return up
    if whole and up is not None and up.axis == "intermediate" and up.fused == fused and not biased:
        return Shard("intermediate", up.rank, up.size)
    raise NotImplementedError(
        f"{name} is tensor parallel with {up_name(experts)} split by {up} and down_proj by {down}"
        f"{', and has biases' if biased else ''}; moelora serves experts that are split by "
        "expert, or by intermediate_size in all of gate, up and down: DistributedConfig(ep_size=)"
    )


def linear_shard(weight: object) -> Shard | None:
    return shard_of(weight, ("out", "in"))


def multiply_locally(model: nn.Module, *, stop: bool = False) -> None:
    """Lets split linear layers multiply the part that this process has, as transformers does for
    quantized ones, or stops that: of DTensors, the host takes longer to launch a product than the
    GPU to compute it."""
    flag, by_moelora = "_hf_quantized_needs_local_tp", "by moelora"
    for module in model.modules():
        if stop and module.__dict__.get(flag) == by_moelora:
            del module.__dict__[flag]
        split = isinstance(module, nn.Linear) and linear_shard(module._parameters.get("weight"))
        if split and not stop:
            module.__dict__.setdefault(flag, by_moelora)


def ranks_of(model: nn.Module, *, with_batches: bool = False) -> Ranks | None:
    """The processes that share the weights of a model; None if this one has all.

    `with_batches`: also those whose weights FSDP gathers, each of which has a batch of its own.
    """
    meshes = getattr(model, "_mesh_manager", None)
    if meshes is None and (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    if meshes is None:
        raise NotImplementedError(
            f"the model is tensor parallel by transformers {transformers.__version__}, whose "
            "shards moelora does not know; it knows those of transformers 5.23 and later"
        )
    config: Any = model.config
    sizes = config.distributed_config
    if sizes.pp_size > 1:
        raise NotImplementedError(
            f"the model is pipeline parallel (pp_size={sizes.pp_size}): a process has only some "
            "of its layers, and adapters need all; take tp_size or ep_size of DistributedConfig"
        )
    if max(sizes.tp_size, sizes.ep_size, sizes.dp_size if with_batches else 1) < 2:
        return None
    if model not in _ranks:
        dense = meshes.get_mesh(("dp_replicate", "fsdp", "tp"))
        _ranks[model] = Ranks(dense.mesh.flatten().tolist())
    return _ranks[model]


def stop_travelling(experts: nn.Module) -> None:
    """Returns a module's exchange of rows to what transformers has installed."""
    exchange = experts.__dict__.pop("_moelora_exchange", None)
    if exchange is not None:
        experts.__dict__["forward"] = exchange


def batch_of(model: nn.Module) -> int:
    """Which of the batches that a parallel model has at a time this process computes."""
    config: Any = model.config
    mesh = cast("Any", model)._mesh_manager.get_mesh(("dp_replicate", "fsdp"))
    replica, place = mesh.get_coordinate()
    return int(replica * config.distributed_config.fsdp_size + place)
