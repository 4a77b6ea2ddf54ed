"""Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

The inverse of `checkpoint.load`, in PEFT's own dialect: experts as `target_parameters` (PEFT from
0.19.1 on, A over the inputs), all other layers as `target_modules`. PEFT names neither parameter of
an experts module in its keys; it wraps the module once per parameter, so that the first one's
factors are below one more `base_layer`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from moelora.adapters.config import CONFIG_FILE
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer, Projection
from moelora.adapters.weights import STEM

PREFIX = "base_model.model."
PEFT_VERSION = "0.19.1"  # the first with these shapes for every experts module

Rows = Iterator[tuple[str, str, int, float, dict[str, Tensor]]]


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """A new folder within `folder`, whose files replace those of `folder` at the end.

    If the body raises, `folder` is as before, but is made if there is none.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".saving-", dir=folder) as new:
        yield Path(new)
        for path in sorted(Path(new).iterdir()):
            path.replace(folder / path.name)


def write(
    adapter: Adapter,
    folder: str | Path,
    layers: Mapping[str, MoELayer],
    linears: Mapping[str, LinearLayer],
    *,
    base_model: str | None = None,
) -> None:
    """Save an adapter in a folder, which is made if there is none.

    Parameters
    ----------
    adapter : Adapter
        Pairs of experts are those of whole parameters: `gate_up` (`up` without a gate) and `down`,
        with one scaling for all experts.
    folder : path
        Files of an adapter in it are replaced.
    layers, linears : mapping
        The layers that `adapter` has pairs of, by name.
    base_model : str, optional
        `base_model_name_or_path` of the configuration.

    Raises
    ------
    ValueError
        A pair is of a half of `gate_up_proj`, or its experts have several scalings.
    """
    from safetensors.torch import save_file

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
            state |= {f"{PREFIX}{prefix}.{key}": _plain(t) for key, t in tensors.items()}
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0] if sizes else ((8, 8.0), 0)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "rank_pattern": {name: r for name, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {name: a for name, (_, a) in sizes.items() if a != alpha},
        "target_modules": modules,
        "target_parameters": parameters or None,
        "task_type": None,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / f"{STEM}.safetensors", metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that shares memory with no other, on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


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


def _linears(adapter: Adapter, linears: Mapping[str, LinearLayer]) -> Rows:
    for name, pair in adapter.linears.items():
        a, b = ("lora_A.weight", "lora_B.weight")
        if linears[name].embedding:
            a, b = ("lora_embedding_A", "lora_embedding_B")
        yield name, name, pair.rank, pair.scaling, {a: pair.a, b: pair.b}
