"""Checks of what a pool is made of: ValueError names the argument, what was got and wanted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch

from moelora.adapters.factors import DTYPES
from moelora.adapters.layers import LinearLayer, MoELayer
from moelora.adapters.stacks import Place
from moelora.operators.checks import check_count, check_mapping
from moelora.operators.storage import check_held

Layer = TypeVar("Layer", MoELayer, LinearLayer)


def layers_of(argument: str, given: Iterable[Layer], kind: type[Layer]) -> list[Layer]:
    """The layers of an argument, whose names are text and whose sizes are positive."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        got = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        raise ValueError(f"{argument} is {got}, wanted a sequence of {kind.__name__}")
    layers = list(given)
    for at, layer in enumerate(layers):
        where = f"{argument}[{at}]"
        if not isinstance(layer, kind):
            raise ValueError(f"{where} is a {type(layer).__name__}, wanted a {kind.__name__}")
        if not isinstance(layer.name, str):
            raise ValueError(f"{where}.name is {layer.name!r}, wanted a string")
        for field in fields(layer):
            if field.type == "int":
                check_count(f"{where}.{field.name}", getattr(layer, field.name))
    return layers


def device_of(argument: str, given: Any) -> torch.device:
    """A device with memory."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"{argument} is {given!r}, wanted a device of torch") from None
    if device.type == "meta":
        raise ValueError(f"{argument} is {given!r}, wanted a device with memory")
    return device


def places(
    names: list[str], device: torch.device, dtype: torch.dtype, others: Any
) -> dict[str, Place]:
    """Device and dtype of each layer; `others` is the argument `places` of the pool."""
    others = {} if others is None else others
    check_mapping("places", others)
    found = dict.fromkeys(names, Place(device, dtype))
    for name, place in others.items():
        if not isinstance(place, tuple | list) or len(place) != 2:
            raise ValueError(f"places[{name!r}] is {place!r}, wanted (device, dtype)")
        if name not in found:
            raise ValueError(f"places names {name}, which is none of the layers")
        found[name] = Place(device_of(f"places[{name!r}]", place[0]), place[1])
    for of in (dtype, *(place.dtype for place in found.values())):
        if of not in DTYPES:
            raise ValueError(f"dtype is {of}, wanted one of {DTYPES}")
    return found


def check_out(out: object, tokens: int, device: torch.device) -> None:
    """ValueError unless a mapping of this many tokens can be written into it."""
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is a {type(out).__name__}, wanted an int32 tensor")
    if out.dtype != torch.int32 or out.dim() != 1 or out.numel() < tokens:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, wanted int32 ({tokens},) or longer"
        )
    if out.device.type != device.type:
        raise ValueError(f"out is on {out.device}, wanted {device}")
    check_held("out", out)
