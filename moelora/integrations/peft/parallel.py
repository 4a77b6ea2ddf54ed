"""Training of PEFT's adapters in models that transformers has sharded.

PEFT's factors of experts are whole in every process. An operator gets the part that goes with the
process's part of the experts; the backward of taking it joins the parts of the gradient, so that
all processes have the gradient of all tokens of their group, bit for bit, and make the same step.
With several batches at a time (`fsdp_size`, `dp_replicate_size`), gradients of all factors are
averaged over them as a backward ends.

    factor                          forward              backward
    split with the experts          this part            all-gather
    whole (A of w13, B of w2)       all of it            all-reduce, as other parts of I add to it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import peft
import peft.tuners.lora.layer as peft_layer
import peft.tuners.lora.model as peft_lora
import torch
from peft import peft_model
from peft.tuners import tuners_utils
from peft.utils import save_and_load
from torch import Tensor, nn
from transformers import PreTrainedModel

from moelora.adapters import MoELayer
from moelora.adapters.shards import Shard, whole
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.parallel import (
    experts_shard,
    linear_shard,
    multiply_locally,
    ranks_of,
)
from moelora.integrations.transformers.projection import Experts, QuantizedProjection
from moelora.operators.checks import dtype_name
from moelora.operators.torch_private import (
    backward_number,
    coalesced,
    foreach_div_,
    ignore_in_ddp,
    when_backward_ends,
)

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
        """The parts of a layer's factors that this process computes with, by their names."""
        parts = _Taken.apply(self, tuple(factors), *factors.values())  # type: ignore[no-untyped-call]
        return dict(zip(factors, parts, strict=True))

    def place(self, name: str) -> _Place | None:
        """Which part of a factor this process takes; None: all of it."""
        dim = _SPLIT[self.shard.axis].get(name)
        halves = self.halves if (name, dim) == ("w13_lora_b", 2) else 1
        return None if dim is None else _Place(self.shard.rank, self.shard.size, dim, halves)


class _Place(NamedTuple):
    """Which part of a factor a process takes: of each of `halves` in dimension `dim`, as torch's
    chunk splits it."""

    rank: int
    size: int
    dim: int
    halves: int

    def part(self, whole: Tensor) -> Tensor:
        blocks = whole.chunk(self.halves, self.dim)
        length = blocks[0].size(self.dim)
        most = -(-length // self.size)
        start = min(self.rank * most, length)
        parts = [block.narrow(self.dim, start, min(most, length - start)) for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def sent(self, part: Tensor, rows: int) -> Tensor:
        """A part of a factor of `rows` in `dim`, padded to the shape that all processes send."""
        part = part.unflatten(self.dim, (self.halves, part.size(self.dim) // self.halves))
        missing = -(-rows // self.halves // self.size) - part.size(self.dim + 1)
        if missing:  # the last processes may have less
            part = nn.functional.pad(part, (0, 0) * (part.dim() - self.dim - 2) + (0, missing))
        return part

    def joined(self, every: Tensor, rows: int) -> Tensor:
        """The factor of `rows` in `dim`, from what all processes sent: (size, ...)."""
        dim = self.dim
        in_order = every.movedim(0, dim + 1).flatten(dim + 1, dim + 2)
        return in_order.narrow(dim + 1, 0, rows // self.halves).flatten(dim, dim + 1)


class _Taken(torch.autograd.Function):
    """The parts of a layer's factors. The backward joins gradients of parts by one collective and
    sums those of factors that all processes take by another, both scaled by `share`."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, names: tuple[str, ...], *factors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.part, ctx.places = part, [part.place(name) for name in names]
        ctx.shapes = [factor.shape for factor in factors]
        parts = tuple(
            factor.view_as(factor) if place is None else place.part(factor).contiguous()
            for factor, place in zip(factors, ctx.places, strict=True)
        )
        needs = zip(parts, ctx.needs_input_grad[2:], strict=True)
        # An operator computes no gradients of frozen factors.
        ctx.mark_non_differentiable(*[part for part, is_needed in needs if not is_needed])
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        group, joined = ctx.part.mesh.get_group(), [None] * len(grads)
        needed = [n for n in range(len(grads)) if ctx.needs_input_grad[2 + n]]
        places = {n: ctx.places[n] for n in needed if ctx.places[n] is not None}
        whole = {n: grads[n] for n in needed if n not in places}
        rows = {n: ctx.shapes[n][place.dim] for n, place in places.items()}
        sent = {n: place.sent(grads[n], rows[n]) for n, place in places.items()}
        if sent:
            flat = torch.cat([part.flatten() for part in sent.values()]).mul_(ctx.part.share)
            every = flat.new_empty(ctx.part.shard.size * flat.numel())
            torch.distributed.all_gather_into_tensor(every, flat, group=group)
            parts = every.view(-1, len(flat)).split([part.numel() for part in sent.values()], 1)
            for n, part in zip(sent, parts, strict=True):
                joined[n] = places[n].joined(part.unflatten(1, sent[n].shape), rows[n])
        if whole:
            flat = torch.cat([grad.flatten() for grad in whole.values()]).mul_(ctx.part.share)
            torch.distributed.all_reduce(flat, group=group)
            for n, grad in zip(whole, flat.split([g.numel() for g in whole.values()]), strict=True):
                joined[n] = grad.view(ctx.shapes[n])
        return None, None, *joined


class Passing(threading.local):
    """Adapter arguments of one call, for experts that transformers' exchange of rows calls.

    The same adapter is active in all processes, so rows of all processes have its slot.
    """

    arguments: Mapping[str, Any] = {}  # noqa: RUF012, only replaced

    def adapters(self, layer: str, hidden_states: Tensor) -> Mapping[str, Any]:
        if not self.arguments:
            return {}
        slots = self.arguments["token_lora_mapping"][:1].expand(hidden_states.size(0))
        return {**self.arguments, "token_lora_mapping": slots.contiguous()}


def begin(model: nn.Module, base: PreTrainedModel, split: Iterable[nn.Module]) -> None:
    """Makes factors that all processes have whole equal, and keeps them so, once each.

    `split` are wrappers of experts that are spread over processes.
    Raises RuntimeError on all ranks unless all have factors of the same names, shapes and dtypes,
    and train the same ones.
    """
    ranks = ranks_of(base, with_batches=True)
    if ranks is None:
        return
    every: Iterable[tuple[str, Any]] = model.named_parameters()
    factors = {n: p for n, p in every if ".lora_" in n and not hasattr(p, "_moelora_shared")}
    if not factors:
        return
    facts = {name: _described(parameter) for name, parameter in factors.items()}
    ranks.together(
        "attach", lambda: facts, lambda same: {"the set of factors": sorted(same), **same}
    )
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if ".lora_" in name and hasattr(weight, "placements"):
            # transformers' tensor parallelism reads whole sizes; PEFT has set those of the part.
            module.out_features, module.in_features = weight.shape
    multiply_locally(model)
    meshes: Any = base._mesh_manager
    dense = meshes.get_mesh(("dp_replicate", "fsdp", "tp"))
    batches = _Averaging(meshes.get_mesh(("dp_replicate", "fsdp")))
    # The backward of `split` has summed over the batches of its group: only replicas are left.
    rest = _Averaging(meshes.get_mesh(("dp_replicate", "efsdp")))
    joined = {id(parameter) for wrapper in split for parameter in wrapper.parameters()}
    for parameter in factors.values():
        # Every placement of a factor is that of tensor parallelism: FSDP has come before it.
        is_split = any(one.is_shard() for one in getattr(parameter, "placements", ()))
        for dimension in range(2 if is_split else 3):
            group = dense.get_group(dimension)
            first = torch.distributed.get_process_group_ranks(group)[0]
            torch.distributed.broadcast(_local(parameter.detach()), first, group=group)
        (rest if id(parameter) in joined else batches).watch(parameter)
        parameter._moelora_shared = True


def _described(factor: Tensor) -> str:
    trained = "trained" if factor.requires_grad else "frozen"
    return f"{trained}, {tuple(factor.shape)} in {dtype_name(factor.dtype)}"


def _local(tensor: Any) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return local


class _Complete(list[Tensor]):
    """Parameters whose gradients one backward has completed."""


class _Averaging:
    """Averages gradients over the batches that processes have at a time, as a backward ends.

    What an earlier backward left in them is equal in all processes, and stays so. A backward within
    another one, of reentrant activation checkpointing, averages what it has completed itself.
    """

    def __init__(self, mesh: Any) -> None:
        sizes = {mesh.get_group(n): mesh.size(n) for n in range(mesh.ndim)}
        self.sizes = {group: size for group, size in sizes.items() if size > 1}
        # By number of the backward, whose callback keeps them: one that fails leaves none.
        self.complete: WeakValueDictionary[int, _Complete] = WeakValueDictionary()

    def watch(self, parameter: Tensor) -> None:
        if self.sizes:
            parameter.register_post_accumulate_grad_hook(self._completed)

    def _completed(self, parameter: Tensor) -> None:
        current = backward_number()
        complete = self.complete.get(current)
        if complete is None:
            complete = self.complete[current] = _Complete()
            when_backward_ends(partial(self._average, complete))
        complete.append(parameter)

    def _average(self, complete: _Complete) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in complete:
            if parameter.grad is not None:
                grad = _local(parameter.grad)
                by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            for group, size in self.sizes.items():
                with coalesced(group):
                    for grad in grads:
                        torch.distributed.all_reduce(grad, group=group)
                foreach_div_(grads, size)


@around("_get_in_out_features", tuners_utils, peft_layer, optional=True)
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


@around("get_tp_plan_and_mesh", peft_lora, optional=True)
def _of_modules(plan_of: Callable[..., Any], model: nn.Module, current_key: str) -> Any:
    """The plan by which PEFT splits a layer's factors; none for experts', which stay whole."""
    owner, _, name = current_key.rpartition(".")
    try:
        is_module = name in model.get_submodule(owner)._modules
    except AttributeError:  # a parameter within another wrapper
        is_module = False
    return plan_of(model, current_key) if is_module else (None, None)


@around("_get_tuner_state_dict_key_prefixes", tuners_utils, optional=True)
def _of_state_dict(prefixes_of: Callable[..., set[str]], *args: Any, **kwargs: Any) -> set[str]:
    """PEFT selects keys by names of modules, of which those of FSDP's activation checkpointing have
    a component that keys lack: it would save an adapter without factors.
    """
    prefixes = prefixes_of(*args, **kwargs)
    return {prefix.replace("._checkpoint_wrapped_module", "") for prefix in prefixes}


def keep_from_ddp(model: nn.Module) -> None:
    """Keep quantized weights, which are buffers, out of DDP's broadcast before each forward."""
    found = (n for n, m in model.named_modules() if isinstance(m, QuantizedProjection))
    ignore_in_ddp(model, {f"{name}.tiles" for name in found})


@around("get_peft_model_state_dict", peft, peft.utils, save_and_load, peft_model)
def _of_adapter(
    state_of: Callable[..., dict[str, Any]], model: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The whole tensors of an adapter, on their device.

    In a model that has a `_tp_size`, PEFT gathers the base model's weights with the adapter's, into
    host memory of each process, before it selects those of the adapter.
    """
    if not getattr(model, "_tp_size", None):
        return state_of(model, *args, **kwargs)
    hidden: dict[str, Any] = model.__dict__
    own = hidden.get("_tp_size")  # a PeftModel has its base model's
    hidden["_tp_size"] = None
    try:
        state = state_of(model, *args, **kwargs)
    finally:
        del hidden["_tp_size"]
        if own is not None:
            hidden["_tp_size"] = own
    return {name: whole(tensor) for name, tensor in state.items()}
