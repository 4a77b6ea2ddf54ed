"""What a pool for some adapters needs: their ranks and forms, and the layers that they are of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from moelora.adapters import AdapterInfo, LinearLayer, MoELayer, peek
from moelora.adapters.checkpoint import hint
from moelora.adapters.columns import Layout
from moelora.adapters.columns import check as check_layout
from moelora.adapters.names import is_called
from moelora.integrations.transformers.linears import Linear
from moelora.integrations.transformers.projection import Experts

DEFAULT_RANKS = 512  # the largest in serving engines; a file can contain any rank

Targets: TypeAlias = 'Literal["all"] | Sequence[str] | None'


def named_folders(
    adapters: Mapping[str, str | Path] | Iterable[str | Path],
) -> dict[str, str | Path]:
    if isinstance(adapters, (str, Path)) or not isinstance(adapters, Iterable):
        raise ValueError(f"adapters is {str(adapters)!r}, wanted a mapping or a list of folders")
    folders = list(adapters.values() if isinstance(adapters, Mapping) else adapters)
    for folder in folders:
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"adapters has {folder!r:.80}, wanted folders, or ids of the Hub")
    if isinstance(adapters, Mapping):
        return dict(adapters)
    names = [Path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"the folders are called {names}, two the same; pass a mapping")
    return dict(zip(names, folders, strict=True))


def layouts_of(
    layout: Layout | Mapping[str, Layout] | None, names: Iterable[str]
) -> dict[str, Layout]:
    """The layouts that the caller has given, by adapter."""
    if layout is None:
        return {}
    if not isinstance(layout, Mapping):
        check_layout(layout)
        return dict.fromkeys(names, layout)
    unknown = sorted(layout.keys() - set(names))
    if unknown:
        raise ValueError(f"layout names {unknown}, which are none of the adapters")
    return dict(layout)


def peek_at(
    name: str,
    folder: Path,
    specs: Sequence[MoELayer],
    linears: Mapping[str, Linear],
    layout: Layout | None,
) -> AdapterInfo:
    """Content of a folder; raises ValueError for factors of a layer that cannot be served."""
    try:
        info = peek(folder, specs, [linear.layer for linear in linears.values()], layout=layout)
    except ValueError as error:
        raise ValueError(f"adapter {name!r}: {error}{hint(folder)}") from None
    for layer in info.linear_ranks:
        if linears[layer].refusal:
            raise ValueError(f"adapter {name!r}: factors of {layer}, {linears[layer].refusal}")
    return info


def check_ranks(
    infos: Mapping[str, AdapterInfo], max_rank: int | None, max_linear_rank: int | None
) -> None:
    """Raises ValueError for ranks too large for a pool of default size."""
    for name, info in infos.items():
        largest = max(info.linear_ranks.values(), default=0)
        for limit, rank, option in (
            (max_rank, info.max_rank, "max_rank"),
            (max_linear_rank, largest, "max_linear_rank"),
        ):
            if limit is None and rank > max(DEFAULT_RANKS, max_rank or 0):
                raise ValueError(
                    f"adapter {name!r} has rank {rank}, which all factors of every slot would be "
                    f"padded to; by default a pool takes ranks up to {DEFAULT_RANKS}: pass "
                    f"{option}= for more"
                )


def smallest(
    infos: Sequence[AdapterInfo], layers: Sequence[MoELayer], max_rank: int | None
) -> dict[str, Any]:
    """Sizes of the smallest pool for these adapters, as arguments of `new_pool`.

    `max_rank` is the caller's, which layers other than experts have room for, too.
    """
    of_experts = [info for info in infos if info.max_rank]
    linear_ranks = [rank for info in infos for rank in info.linear_ranks.values()]
    # With interleaved rows, separate gate and up of a checkpoint share one slice.
    joined = any(layer.interleaved for layer in layers)
    return {
        "w13_slices": 1 if not infos or (of_experts and all(i.fused for i in of_experts)) else 2,
        "shared_outer": bool(of_experts) and all(i.shared_outer for i in of_experts),
        "max_rank": max(
            (i.max_rank * (2 if joined and not i.fused else 1) for i in of_experts), default=16
        ),
        "max_linear_rank": max([*linear_ranks, max_rank or 0]) or 16,
    }


def served_of(
    targets: Targets,
    infos: Sequence[AdapterInfo],
    experts: Mapping[str, tuple[Experts, MoELayer]],
    linears: Mapping[str, Linear],
) -> tuple[dict[str, tuple[Experts, MoELayer]], dict[str, Linear]]:
    """The layers that the pool allocates factors for."""
    possible = {name: linear for name, linear in linears.items() if not linear.refusal}
    if targets == "all" or (targets is None and not infos):
        return dict(experts), possible
    touched = {name for info in infos for name in info.linear_ranks}
    if targets is None:
        needed = any(info.max_rank for info in infos)
        return dict(experts) if needed else {}, {n: possible[n] for n in possible if n in touched}
    if isinstance(targets, str) or not isinstance(targets, Iterable) or not list(targets):
        raise ValueError(f'targets is {targets!r}, wanted "all" or a list of names')

    def chosen(name: str) -> bool:
        return any(is_called(name, target) for target in targets)

    for target in targets:
        if not any(is_called(name, target) for name in (*experts, *possible)):
            raise ValueError(f"targets names {target!r}, which no layer that is served is called")
    return (
        {name: found for name, found in experts.items() if chosen(name)},
        {name: linear for name, linear in possible.items() if chosen(name)},
    )


def others_of(
    experts: Mapping[str, tuple[Experts, MoELayer]], linears: Mapping[str, Linear], served: set[str]
) -> dict[MoELayer | LinearLayer, str]:
    """The layers without factors in the pool, and why."""
    none = "which this pool has no room for; name it in targets= of load_adapters"
    others: dict[MoELayer | LinearLayer, str] = {}
    for name, (_, layer) in experts.items():
        if name not in served:
            others[layer] = none
    for name, linear in linears.items():
        if name not in served:
            others[linear.layer] = linear.refusal or none
    return others
