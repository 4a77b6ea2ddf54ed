"""Training of PEFT's adapters in models that transformers has sharded.

PEFT's factors of experts are whole in every process. An operator gets the part that goes with the
process's part of the experts; the backward of taking it joins the parts of the gradient, so that
all processes have the gradient of all tokens of their group, bit for bit, and make the same step.
With several batches at a time (`fsdp_size`, `dp_replicate_size`), gradients of all factors are
averaged over them as they are accumulated.

    factor                          forward              backward
    split with the experts          this part            all-gather
    whole (A of w13, B of w2)       all of it            all-reduce, as other parts of I add to it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import peft.tuners.lora.layer as peft_layer
import peft.tuners.lora.model as peft_lora
import torch
from peft.tuners import tuners_utils
from torch import Tensor, nn

from moelora.adapters.shards import Shard
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.parallel import experts_shard, linear_shard, ranks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moelora.adapters import MoELayer
    from moelora.integrations.transformers.projection import Experts

# Dimensions of stacked factors, (adapters, E, r, in) and (adapters, E, out, r), that are split.
_SPLIT = {
    "experts": {"w13_lora_a": 1, "w13_lora_b": 1, "w2_lora_a": 1, "w2_lora_b": 1},
    "intermediate": {"w13_lora_b": 2, "w2_lora_a": 3},
}


class Part(NamedTuple):
    """What a process has of a layer of experts, and of whose batches it gets rows."""

    shard: Shard
    mesh: Any
    halves: int  # of the rows of w13: gate and up, unless they are interleaved
    share: float  # of a batch in the mean over those that a group of experts gets rows of

    @classmethod
    def of(
        cls, name: str, model: PreTrainedModel, experts: Experts, layer: MoELayer
    ) -> Part | None:
        """None: the process has all experts."""
        shard = experts_shard(name, experts, layer)
        if shard is None:
            return None
        meshes: Any = model._mesh_manager
        sizes = model.config.distributed_config
        by_experts = shard.axis == "experts"
        return cls(
            shard,
            meshes.get_mesh("ep" if by_experts else "tp"),
            2 if layer.gated and not layer.interleaved else 1,
            sizes.tp_size / sizes.ep_size if by_experts else 1.0,
        )

    def take(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapter factors of this process, from those of all experts; views where that is
        possible."""
        group, split = self.mesh.get_group(), _SPLIT[self.shard.axis]
        taken = {}
        for name, factor in factors.items():
            dim = split.get(name)
            halves = self.halves if name == "w13_lora_b" and dim == 2 else 1
            place = _Place(group, self.shard.rank, self.shard.size, dim, halves)
            taken[name] = _Taken.apply(factor, place, self.share)  # type: ignore[no-untyped-call]
        return taken


class _Place(NamedTuple):
    """Which part of a factor a process takes: of each of `halves` in dimension `dim`, as torch's
    chunk splits it; None: all of it."""

    group: Any
    rank: int
    size: int
    dim: int | None
    halves: int

    def part(self, whole: Tensor) -> Tensor:
        if self.dim is None:
            return whole.view_as(whole)
        blocks = whole.chunk(self.halves, self.dim)
        length = blocks[0].size(self.dim)
        most = -(-length // self.size)
        start = min(self.rank * most, length)
        parts = [block.narrow(self.dim, start, min(most, length - start)) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def joined(self, part: Tensor, rows: int) -> Tensor:
        """The tensor of `rows` in `dim` from the parts of all processes; the sum if each has all
        of it. May overwrite `part`."""
        if self.dim is None:
            torch.distributed.all_reduce(part, group=self.group)
            return part
        dim, length = self.dim, rows // self.halves
        part = part.unflatten(dim, (self.halves, part.size(dim) // self.halves))
        missing = -(-length // self.size) - part.size(dim + 1)
        if missing:  # the last processes may have less
            part = nn.functional.pad(part, (0, 0) * (part.dim() - dim - 2) + (0, missing))
        every = part.new_empty(self.size * part.size(0), *part.shape[1:])
        torch.distributed.all_gather_into_tensor(every, part.contiguous(), group=self.group)
        in_order = every.unflatten(0, (self.size, part.size(0))).movedim(0, dim + 1)
        in_order = in_order.flatten(dim + 1, dim + 2)
        return in_order.narrow(dim + 1, 0, length).flatten(dim, dim + 1)


class _Taken(torch.autograd.Function):
    """The part of a factor; its gradient is joined from those of all parts, scaled by `share`."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, place: _Place, share: float) -> Tensor:
        ctx.place, ctx.share, ctx.rows = place, share, factor.size(place.dim or 0)
        return place.part(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.share != 1 or ctx.place.dim is None:  # which overwrites what autograd may share
            grad = grad * ctx.share
        return ctx.place.joined(grad.contiguous(), ctx.rows), None, None


class Passing(threading.local):
    """Adapter arguments of one call, for experts that transformers' exchange of rows calls."""

    arguments: Mapping[str, Any] = {}  # noqa: RUF012, only replaced

    def adapters(self, layer: str, hidden_states: Tensor) -> Mapping[str, Any]:
        return self.arguments

    def slots_of(self, layer: str, hidden_states: Tensor) -> Tensor:
        slots: Tensor = self.arguments["token_lora_mapping"]
        return slots

    @contextmanager
    def travelled(self, slots: Tensor) -> Iterator[None]:
        with self.call({**self.arguments, "token_lora_mapping": slots}):
            yield

    @contextmanager
    def call(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        outer = self.arguments
        try:
            self.arguments = arguments
            yield
        finally:
            self.arguments = outer


def begin(model: nn.Module, base: PreTrainedModel) -> None:
    """Makes factors that all processes have whole equal, and keeps them so.

    Raises RuntimeError on all ranks unless all have factors of the same names and shapes.
    """
    ranks = ranks_of(base, with_batches=True)
    if ranks is None:
        return
    factors = {n: parameter for n, parameter in model.named_parameters() if ".lora_" in n}
    shapes = {name: tuple(parameter.shape) for name, parameter in factors.items()}
    ranks.together(
        "attach", lambda: shapes, lambda same: {"the set of factors": sorted(same), **same}
    )
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if ".lora_" in name and hasattr(weight, "placements"):
            # PEFT gives those of this process's part, transformers' tensor parallelism reads whole.
            module.out_features, module.in_features = weight.shape
    meshes: Any = base._mesh_manager
    dense = meshes.get_mesh(("dp_replicate", "fsdp", "tp"))
    batches = meshes.get_mesh(("dp_replicate", "fsdp"))
    for parameter in factors.values():
        # Every placement of a factor is that of tensor parallelism: FSDP has come before it.
        split = any(one.is_shard() for one in getattr(parameter, "placements", ()))
        for dimension in range(2 if split else 3):
            group = dense.get_group(dimension)
            first = torch.distributed.get_process_group_ranks(group)[0]
            torch.distributed.broadcast(_local(parameter.detach()), first, group=group)
        if batches.size() > 1:
            parameter.register_post_accumulate_grad_hook(_Averaged(batches))


def _local(tensor: Any) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


class _Averaged:
    """Averages a gradient over the batches that processes have at a time, when it is complete.

    What an earlier backward left in it is equal in all processes, and stays so.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __call__(self, parameter: Tensor) -> None:
        for dimension in range(self.mesh.ndim):
            size = self.mesh.size(dimension)
            if size > 1 and parameter.grad is not None:
                grad, group = _local(parameter.grad), self.mesh.get_group(dimension)
                torch.distributed.all_reduce(grad, group=group)
                grad.div_(size)


def _of_tp(features_of: Callable[..., Any], module: nn.Module) -> Any:
    """The sizes that a process computes with: FSDP gathers weights before, of which PEFT knows only
    for meshes without other dimensions."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not hasattr(weight, "placements"):
        return features_of(module)
    sizes = {"out": weight.shape[0], "in": weight.shape[1]}
    shard = linear_shard(weight)
    if shard is not None:
        part = -(-sizes[shard.axis] // shard.size)
        sizes[shard.axis] = min(part, sizes[shard.axis] - shard.rank * part)
    return sizes["in"], sizes["out"]


if hasattr(tuners_utils, "_get_in_out_features") and hasattr(peft_layer, "_get_in_out_features"):
    around("_get_in_out_features", tuners_utils, peft_layer)(_of_tp)


def _of_modules(plan_of: Callable[..., Any], model: nn.Module, current_key: str) -> Any:
    """PEFT splits the factors of linear layers by their plan; those of parameters stay whole."""
    owner, _, name = current_key.rpartition(".")
    try:
        is_module = name in model.get_submodule(owner)._modules
    except AttributeError:  # a parameter within another wrapper
        is_module = False
    return plan_of(model, current_key) if is_module else (None, None)


if hasattr(peft_lora, "get_tp_plan_and_mesh"):
    around("get_tp_plan_and_mesh", peft_lora)(_of_modules)


def _of_state_dict(prefixes_of: Callable[..., set[str]], *args: Any, **kwargs: Any) -> set[str]:
    """PEFT selects keys by names of modules, of which those of FSDP's activation checkpointing have
    a component that keys lack: it would save an adapter without factors.
    """
    prefixes = prefixes_of(*args, **kwargs)
    return {prefix.replace("._checkpoint_wrapped_module", "") for prefix in prefixes}


if hasattr(tuners_utils, "_get_tuner_state_dict_key_prefixes"):
    around("_get_tuner_state_dict_key_prefixes", tuners_utils)(_of_state_dict)
