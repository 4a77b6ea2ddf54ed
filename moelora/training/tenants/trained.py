"""Factors of an adapter that an optimizer updates, and what is saved of both, by key.

`Tenant` is one in the slot of a pool, `LoraSlot` one in a slot of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from moelora.adapters.layers import Adapter, LinearPair, Pair, Projection
from moelora.training.tenants.factors import Factor, padded
from moelora.training.tenants.resumed import check_groups, check_optimizer

# Stacks or factors (A, B) by layer and projection; "" is that of linear layers and embeddings.
Place: TypeAlias = "tuple[str, Projection | str]"
Key: TypeAlias = "tuple[str, Projection | str, str]"  # a place, and "A" or "B"
FORMAT = 1  # of STATE_FILE


class Trained:
    """Pairs of factors and their scalings by place, and the optimizer of their parameters."""

    optimizer: Optimizer
    _pairs: dict[Place, tuple[Factor, Factor]]
    _scalings: dict[Place, float]

    def factors(self) -> list[Factor]:
        return [factor for pair in self._pairs.values() for factor in pair]

    def parameters(self) -> list[Tensor]:
        """What the optimizer has, A and B in turns, padded to the ranks of the stacks."""
        return [factor.parameter for factor in self.factors()]

    def _keyed(self) -> dict[Key, Factor]:
        return {
            (*place, side): factor
            for place, pair in self._pairs.items()
            for side, factor in zip("AB", pair, strict=True)
        }

    def _groups(self) -> list[list[Key]]:
        """The factors that each group of the optimizer has."""
        keys = {id(factor.parameter): key for key, factor in self._keyed().items()}
        return [[keys[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def _adapter_of(self, values: Sequence[Tensor], host: bool = True) -> Adapter:
        """An adapter of values of `factors`, float32 and without padding: copies on the CPU, or
        views."""
        factors = self.factors()
        values = [factor.own(value) for factor, value in zip(factors, values, strict=True)]
        by_factor = dict(
            zip(map(id, factors), host_copies(values) if host else values, strict=True)
        )
        experts: dict[str, dict[Projection, Pair]] = {}
        linears = {}
        for (layer, projection), pair in self._pairs.items():
            a, b = (by_factor[id(f)] for f in pair)
            scaling = self._scalings[layer, projection]
            if projection == "":
                linears[layer] = LinearPair(a[0].T if pair[0].dim == 2 else a[0], b[0], scaling)
            else:
                experts.setdefault(layer, {})[projection] = Pair(a, b, [scaling])  # type: ignore[index] # not ""
        return Adapter(experts, linears)

    def _state_of(
        self,
        gradients: Sequence[Tensor | None],
        copy: Callable[[Tensor], Tensor] = Tensor.clone,
        **counts: Any,
    ) -> dict[str, Any]:
        """What continues the training beside the factors, by key and without padding: copies."""
        state, groups = self.optimizer.state_dict(), self._groups()
        numbers = {key: n for n, key in enumerate(chain.from_iterable(groups))}
        factors = {}
        for (key, factor), grad in zip(self._keyed().items(), gradients, strict=True):
            values = state["state"].get(numbers.get(key), {})
            factors[key] = {
                "shape": tuple(factor.own(factor.parameter).shape),
                "gradient": None if grad is None else copy(factor.own(grad)),
                "state": {
                    name: copy(_own(value, factor)) if isinstance(value, Tensor) else value
                    for name, value in values.items()
                },
            }
        return {
            "format": FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "groups": [
                group | {"params": keys}
                for group, keys in zip(state["param_groups"], groups, strict=True)
            ],
            **counts,
            "factors": factors,
        }

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Give the optimizer what `_state_of` has of it. ValueError if that is of another one."""
        groups, factors = self._groups(), self._keyed()
        check_optimizer(saved, self.optimizer)
        check_groups(saved, groups, self.optimizer)
        numbers = {key: n for n, key in enumerate(chain.from_iterable(groups))}
        states = {}
        for group, keys in zip(self.optimizer.param_groups, groups, strict=True):
            steps_on_device = bool(group.get("fused") or group.get("capturable"))
            for key in keys:
                parameter, of = factors[key].parameter, saved["factors"][key]
                states[numbers[key]] = {
                    name: _loaded(parameter, value, of["shape"], steps_on_device or name != "step")
                    if isinstance(value, Tensor)
                    else value
                    for name, value in of["state"].items()
                }
        self.optimizer.load_state_dict(
            {
                "state": {n: values for n, values in states.items() if values},
                "param_groups": [
                    group | {"params": [numbers[key] for key in keys]}
                    for group, keys in zip(saved["groups"], groups, strict=True)
                ],
            }
        )


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor as the parameter is: the part of this process, if it is a DTensor."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined] # of a DTensor
    return distribute_tensor(whole.to(parameter.device), mesh, parameter.placements)


def padded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value in a new tensor of the parameter's shape, device and placements, padded by zeros. A
    copy of pinned memory is launched on the current stream, without a wait."""
    value = value.to(parameter.device, non_blocking=True)
    return like(parameter, padded(value, parameter.shape))


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies in host memory, which is pinned for tensors of a GPU. All copies are
    launched before this waits, once for each GPU."""
    copies = [
        torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=t.is_cuda).copy_(
            t, non_blocking=True
        )
        for t in tensors
    ]
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _own(value: Tensor, factor: Factor) -> Tensor:
    """A tensor of an optimizer's state, without padding if it is of the factor's shape."""
    return factor.own(value) if value.shape == factor.parameter.shape else value


def _loaded(parameter: Tensor, value: Tensor, shape: tuple[int, ...], on_device: bool) -> Tensor:
    """A tensor of an optimizer's state in a new one, on the device where `load_state_dict` would
    put it."""
    if tuple(value.shape) == shape:
        return padded_like(parameter, value)
    device = parameter.device if on_device else value.device
    return value.to(device, non_blocking=True, copy=True)
