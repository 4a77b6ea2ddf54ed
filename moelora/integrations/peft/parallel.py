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

    def take(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The adapter arguments of this process, from those of all experts."""
        split = _SPLIT[self.shard.axis]
        return {
            name: self._factor(value, split.get(name), self.halves if name == "w13_lora_b" else 1)
            if "_lora_a" in name or "_lora_b" in name
            else value
            for name, value in arguments.items()
        }

    def _factor(self, factor: Tensor, dim: int | None, halves: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate
        from torch.distributed.tensor import Shard as Split

        if self.share != 1:
            factor = _Scaled.apply(factor, self.share)  # type: ignore[no-untyped-call]

        def whole(t: Tensor) -> Any:
            return DTensor.from_local(t, self.mesh, [Replicate()], run_check=False)

        if dim is None:
            partial: Tensor = whole(factor).to_local(grad_placements=[Partial()])
            return partial
        blocks = factor.chunk(halves if dim == 2 else 1, dim)
        parts = [whole(b).redistribute(placements=[Split(dim)]).to_local() for b in blocks]
        return torch.cat(parts, dim).contiguous()


class _Scaled(torch.autograd.Function):
    """Identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.scale, None


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
