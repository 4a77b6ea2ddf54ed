"""The training state of a tenant in files: training.json, and its tensors in training.safetensors.

JSON has numbers, texts, lists, and dictionaries of text keys as they are, and all else as an object
of one key:

    {"$tensor": "3"}                            tensor "3" of training.safetensors
    {"$sparse": {"indices": {"$tensor": "4"},   a sparse tensor with one sparse dimension
                 "values": {"$tensor": "5"}, "shape": [8, 4, 128]}}
    {"$tuple": [value, ...]}
    {"$dict": [[key, value], ...]}              a dictionary of other keys
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelora.adapters import write
from moelora.adapters.files import file_in, host_copy, read_json, write_tensors
from moelora.adapters.folders import replacing
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer
from moelora.operators.torch_private import sparse_parts

STATE_FILE = "training.json"
TENSORS_FILE = "training.safetensors"
STATE_FILES = (STATE_FILE, TENSORS_FILE)

_PLAIN = (bool, int, float, str, type(None))


def save(
    folder: str | Path,
    adapter: Adapter,
    state: Mapping[str, Any] | None,
    layers: Mapping[str, MoELayer],
    linears: Mapping[str, LinearLayer],
    base_model: str | None,
) -> None:
    """Write a PEFT folder and, unless it is None, the training state, in place of an older one."""
    with replacing(folder, (*write.FILES, *STATE_FILES)) as new:
        write.save(new, *write.peft_tensors(adapter, layers, linears, base_model=base_model))
        if state is not None:
            write_state(new, state)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what `read_state` returns, for a folder that has neither file.

    Raises ValueError for a value of a type that the files cannot hold, before anything is written.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encoded(dict(state), "", tensors), indent=1)
    write_tensors(folder / TENSORS_FILE, tensors)
    (folder / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises FileNotFoundError if the folder or a file is missing, ValueError if a file is damaged, is
    a link out of the folder, or has a tensor of which the other file does not tell.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    state, tensors = (file_in(folder, name) for name in STATE_FILES)
    for path in (state, tensors):
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {path.name}: it was saved without optimizer"
            )
    try:
        left = load_file(tensors)
    except SafetensorError as error:
        raise ValueError(f"{tensors} is damaged: {error}") from None
    content = read_json(state)
    try:
        found = {key: _decoded(value, left) for key, value in content.items()}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{state} is damaged: {type(error).__name__}: {why:.200}") from None
    if left:
        raise ValueError(f"{tensors} has tensors of which {STATE_FILE} does not tell: {len(left)}")
    return found


def encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON has it; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        if value.layout == torch.sparse_coo and value.sparse_dim() == 1:
            parts = dict(zip(("indices", "values"), sparse_parts(value), strict=True))
            held = {name: encoded(part, where, tensors) for name, part in parts.items()}
            return {"$sparse": {**held, "shape": list(value.shape)}}
        if value.layout == torch.strided:
            name = str(len(tensors))
            tensors[name] = host_copy(value)  # safetensors refuses tensors that share memory
            return {"$tensor": name}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        items = [encoded(item, f"{where}[{n}]", tensors) for n, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [
            (encoded(k, f"{where}[{k!r}]", tensors), encoded(v, f"{where}[{k!r}]", tensors))
            for k, v in value.items()
        ]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": [list(pair) for pair in pairs]}
    raise ValueError(
        f"{STATE_FILE} cannot hold {where:.200}, a {type(value).__name__}, wanted a tensor, "
        "number, text, list, tuple or dictionary: save with optimizer=False"
    )


def _decoded(value: Any, left: dict[str, Tensor]) -> Any:
    """Inverse of `encoded`; each tensor is taken from `left` once, so that none takes more memory
    than the file does.
    """
    if isinstance(value, list):
        return [_decoded(item, left) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if len(value) > 1 or not key.startswith("$"):
        return {key: _decoded(item, left) for key, item in value.items()}
    if key not in _TAGS:
        raise KeyError(key)
    return _TAGS[key](value[key], left)


def _dict(pairs: list[Any], left: dict[str, Tensor]) -> dict[Any, Any]:
    found = {}
    for key, value in pairs:
        key = _decoded(key, left)
        # Tuples within tuples may take exponential time to hash.
        if not all(isinstance(part, _PLAIN) for part in (key if isinstance(key, tuple) else [key])):
            raise TypeError(f"a key is {key!r:.80}, wanted a number, text, or tuple of these")
        found[key] = _decoded(value, left)
    return found


def _sparse(parts: dict[str, Any], left: dict[str, Tensor]) -> Tensor:
    """Checks the indices; those of `write_state` are sorted and without duplicates."""
    indices, values = (_decoded(parts[name], left) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(
        indices, values, parts["shape"], is_coalesced=True, check_invariants=True
    )


_TAGS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "$tensor": lambda name, left: left.pop(name),
    "$sparse": _sparse,
    "$tuple": lambda items, left: tuple([_decoded(item, left) for item in items]),
    "$dict": _dict,
}
