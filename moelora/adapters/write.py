"""Write an adapter: `adapter_config.json` and `adapter_model.safetensors`.

The inverse of `checkpoint.load`: `save` writes what `peft_tensors` or `per_expert_tensors` returns.

`peft_tensors` has PEFT's own dialect: experts as `target_parameters` (PEFT from 0.19.1 on, A over
the inputs), all other layers as `target_modules`. PEFT names neither parameter of an experts module
in its keys; it wraps the module once per parameter, so that the first one's factors are below one
more `base_layer`.

`per_expert_tensors` has a pair of factors for each expert, which PEFT wrote when experts were
linear layers, and which vLLM reads for the models whose experts it does not keep in stacks.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from moelora import _C
from moelora.adapters.config import CONFIG_FILE
from moelora.adapters.engine_names import NAMES, OF_TRANSFORMERS, EngineNames
from moelora.adapters.files import host_copy, write_tensors
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer, Pair, Projection
from moelora.adapters.weights import STEM

PREFIX = "base_model.model."
# The first PEFT with these shapes for every experts module, and who wrote the file instead of it.
WRITER = f"0.19.1+moelora.{_C.version()}"
FILES = (CONFIG_FILE, f"{STEM}*")  # an adapter's, as patterns

COMMON: dict[str, Any] = {  # options of PEFT that are the same for every adapter
    "peft_type": "LORA",
    "peft_version": WRITER,
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "task_type": None,
}

# Target of the configuration, module of the keys, rank, scaling, factors A and B by the key's end.
Row = tuple[str, str, int, float, dict[str, Tensor]]
Rows = Iterator[Row]
# `per_expert_tensors` refuses more bytes than this if padding makes them of a MOST_PADDING-th.
LARGE, MOST_PADDING = 1 << 30, 16


def save(folder: str | Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write both files to a folder, which is made if there is none, and which has no other adapter:
    `moelora.adapters.folders.replacing` makes one that takes the place of an older one."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, text = folder / f"{STEM}.safetensors", folder / CONFIG_FILE
    write_tensors(tensors, state)
    text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    # safetensors 0.8 makes files that only their owner can read; servers run as other users.
    tensors.chmod(stat.S_IMODE(text.stat().st_mode))


def peft_tensors(
    adapter: Adapter,
    layers: Mapping[str, MoELayer],
    linears: Mapping[str, LinearLayer],
    *,
    base_model: str | None = None,
    copy: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of an adapter in PEFT's dialect.

    Parameters
    ----------
    adapter : Adapter
        Pairs of experts are those of whole parameters: `gate_up` (`up` without a gate) and `down`,
        with one scaling for all experts.
    layers, linears : mapping
        The layers that `adapter` has pairs of, by name.
    base_model : str, optional
        `base_model_name_or_path` of the configuration.
    copy : bool
        Contiguous copies on the CPU; False: tensors stay on their device, and may be views.

    Raises
    ------
    ValueError
        A pair is of a half of `gate_up_proj`, or its experts have several scalings.
    """
    plain = host_copy if copy else Tensor.detach
    modules: list[str] = []
    parameters: list[str] = []
    sizes: dict[str, tuple[int, float]] = {}
    state: dict[str, Tensor] = {}
    found: Sequence[tuple[list[str], Rows]] = (
        (parameters, _experts(adapter, layers)),
        (modules, _linears(adapter, linears)),
    )
    for targets, rows in found:
        for target, prefix, rank, scaling, tensors in rows:
            targets.append(target)
            sizes[target] = rank, rank * scaling
            state |= {f"{PREFIX}{prefix}.{key}": plain(t) for key, t in tensors.items()}
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0] if sizes else ((8, 8.0), 0)
    config = {
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: r for name, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {name: a for name, (_, a) in sizes.items() if a != alpha},
        "target_modules": modules,
        "target_parameters": parameters or None,
    }
    return COMMON | config, state


def per_expert_tensors(
    adapter: Adapter,
    layers: Mapping[str, MoELayer],
    linears: Mapping[str, LinearLayer],
    *,
    names: EngineNames = OF_TRANSFORMERS,
    base_model: str | None = None,
    copy: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of an adapter with one pair of factors for each expert.

    All pairs get one rank, the largest (smaller ones are padded with zeros), and one scaling, into
    which those of B are multiplied where they differ: vLLM and SGLang read neither `rank_pattern`
    nor `alpha_pattern`.

    Parameters
    ----------
    adapter : Adapter
    names : EngineNames, optional
        Names of layers in the result; by default those of `layers` and `linears`.
    layers, linears, base_model, copy
        As of `peft_tensors`.

    Raises
    ------
    ValueError
        The dtype of a B cannot represent it times its scaling; the message names the module. Or
        most of more than a GiB would be zeros.
    """
    plain = host_copy if copy else Tensor.detach
    pairs = [*_per_expert(adapter, layers, names.projections), *_linears(adapter, linears)]
    rank = max((rank for *_, rank, _, _ in pairs), default=8)
    _check_padding(pairs, rank)
    scalings = Counter(scaling for *_, scaling, _ in pairs if scaling)
    common = scalings.most_common(1)[0][0] if scalings else 1.0
    alpha = float(rank * common)
    state: dict[str, Tensor] = {}
    # SGLang compares these names, the same for experts of all models, with those it has slots for.
    targets = set(NAMES.values()) if adapter.experts else set()
    for _, name, own, scaling, tensors in pairs:
        (a_key, a), (b_key, b) = tensors.items()
        if scaling != common:
            b = _scaled(name, b, scaling / common)
        if own != rank:  # `pad` copies in any case
            a, b = pad(a, (0, 0, 0, rank - own)), pad(b, (0, rank - own))
        for module in names.of(name):
            targets.add(module.rpartition(".")[2])
            state[f"{PREFIX}{module}.{a_key}"] = plain(a)
            state[f"{PREFIX}{module}.{b_key}"] = plain(b)
    config: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted(targets),
        "target_parameters": None,
    }
    return COMMON | config, state


def _check_padding(pairs: Sequence[Row], rank: int) -> None:
    """ValueError if one rank for all pairs makes much of little."""
    stored = padded = 0
    for *_, own, _, tensors in pairs:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        stored, padded = stored + nbytes, padded + nbytes // max(own, 1) * rank
    if padded > max(LARGE, MOST_PADDING * stored):
        largest = next(name for _, name, own, _, _ in pairs if own == rank)
        raise ValueError(
            f"{largest} has rank {rank}, which all pairs get: {padded >> 20} MiB of {stored >> 20} "
            "MiB; train with ranks that differ less, or serve the adapter with moelora"
        )


def _scaled(name: str, b: Tensor, factor: float) -> Tensor:
    """B of a module times `factor`. ValueError if its dtype cannot represent that."""
    scaled = (b.float() * factor).to(b.dtype)
    if not scaled.isfinite().all():
        raise ValueError(
            f"lora_B of {name} times {factor:g}, its scaling beside that of most modules, "
            f"overflows {b.dtype}; convert the adapter's tensors to bfloat16 or float32"
        )
    return scaled


def _experts(adapter: Adapter, layers: Mapping[str, MoELayer]) -> Rows:
    for name, pairs in adapter.experts.items():
        layer = layers[name]
        projections: tuple[Projection, ...] = ("gate_up" if layer.gated else "up", "down")
        if more := pairs.keys() - set(projections):
            raise ValueError(f"{name} has factors of {sorted(more)}, wanted {list(projections)}")
        there = [n for n, projection in enumerate(projections) if projection in pairs]
        for n in there:
            pair, parameter = pairs[projections[n]], f"{name}.{layer.parameters[n]}"
            if len(pair.scalings) != 1:
                raise ValueError(f"{parameter} has {len(pair.scalings)} scalings, wanted one")
            a = pair.a.expand(layer.num_experts, -1, -1).flatten(0, 1)
            b = pair.b.expand(layer.num_experts, -1, -1).permute(1, 2, 0).flatten(1)
            module = f"{name}.base_layer" if n < max(there) else name
            tensors = {"lora_A.weight": a, "lora_B.weight": b}
            yield parameter, module, pair.rank, pair.scalings[0], tensors


def _per_expert(
    adapter: Adapter, layers: Mapping[str, MoELayer], names: Mapping[Projection, str]
) -> Rows:
    """The pairs of single experts; those of gate and up are separate."""
    for name, pairs in adapter.experts.items():
        layer = layers[name]
        for projection, pair in _separate(layer, pairs).items():
            for n in range(layer.num_experts):
                module = f"{name}.{n}.{names[projection]}"
                # Factors and scalings that all experts share are there once.
                a, b = pair.a[n % len(pair.a)], pair.b[n % len(pair.b)]
                tensors = {"lora_A.weight": a, "lora_B.weight": b}
                scaling = pair.scalings[n % len(pair.scalings)]
                yield module, module, pair.rank, scaling, tensors


def _separate(layer: MoELayer, pairs: Mapping[Projection, Pair]) -> dict[Projection, Pair]:
    """Pairs of gate, up and down of a layer; zeros for those it has none of, as vLLM reads all or
    none of a layer."""
    found = dict(pairs)
    if both := found.pop("gate_up", None):
        gate, up = both.b.chunk(2, dim=1)
        if layer.interleaved:
            gate, up = both.b[:, 0::2], both.b[:, 1::2]
        found["gate"] = replace(both, b=gate)
        found["up"] = replace(both, b=up)
    some = next(iter(pairs.values()))
    gates: tuple[Projection, ...] = ("gate",) if layer.gated else ()
    for projection in (*gates, "up", "down"):
        if projection not in found:
            wide, tall = layer.shape(projection)
            a = some.a.new_zeros(1, some.rank, wide)
            found[projection] = Pair(a, a.new_zeros(1, tall, some.rank), some.scalings[:1])
    return found


def _linears(adapter: Adapter, linears: Mapping[str, LinearLayer]) -> Rows:
    for name, pair in adapter.linears.items():
        a, b = ("lora_A.weight", "lora_B.weight")
        if linears[name].embedding:
            a, b = ("lora_embedding_A", "lora_embedding_B")
        yield name, name, pair.rank, pair.scaling, {a: pair.a, b: pair.b}
