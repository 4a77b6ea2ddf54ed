"""`moelora doctor --lora --server`: whether a running vLLM holds what an adapter's folder has."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelora.adapters.config import CONFIG_FILE, LoraConfig
from moelora.adapters.digests import by_layer, fingerprint
from moelora.adapters.engine_rules import AGAIN, Fate, Model, vllm_part
from moelora.adapters.files import file_in, read_json
from moelora.adapters.folders import reading
from moelora.adapters.keys import parse
from moelora.adapters.weights import open_weights
from moelora.integrations.vllm.digests import PATH

TIMEOUT = 120  # seconds


def compare(url: str, folder: str, model: Model, found: Sequence[Fate]) -> tuple[list[str], bool]:
    """Lines of what a server holds, and whether that is what the folder has. ValueError if the
    server does not say."""
    address, _, name = url.partition("#")
    adapters = _asked(f"{address.rstrip('/')}{PATH}")
    if not name:
        name = _named(adapters, folder)
    if name not in adapters:
        return [f"{address}: there is no adapter {name!r}, only {sorted(adapters)}"], False
    ranks = adapters[name]["ranks"]
    if why := next((rank["why"] for rank in ranks if rank and "why" in rank), None):
        raise ValueError(f"--server {address}: {why}")
    there = [rank for rank in ranks if rank]
    if not there:
        return [f"{address}: {name} is loaded by no rank: send a request first"], False
    dtypes = {rank["dtype"] for rank in there}
    dtype = getattr(torch, dtypes.pop() or "") if len(dtypes) == 1 and None not in dtypes else None
    if dtype is None:
        raise ValueError(f"--server {address}: {name} has factors of several dtypes")
    wanted = reading(Path(folder), lambda place: _digests(place, model, found, dtype))
    wrong = [*_differences(there, wanted)]
    slots = ", ".join("no" if rank["slot"] is None else str(rank["slot"]) for rank in there)
    same = "holds what the folder has" if not wrong else "holds something else"
    said = f"{address}: {name} (slot {slots}; {len(wanted)} layers) {same}"
    return [said, *(f"  {line}" for line in wrong)], not wrong


def _asked(url: str) -> dict[str, Any]:
    request = urllib.request.Request(url)
    if key := os.environ.get("VLLM_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--server {url!r:.200}, wanted the address of a server, http://...")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:  # noqa: S310 # checked
            content = json.load(reply)
            return dict(content["adapters"])
    except urllib.error.HTTPError as error:
        remedy = ": start it with VLLM_PLUGINS=moelora,moelora_digests" if error.code == 404 else ""
        raise ValueError(f"--server: {url} answers {error.code}{remedy}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--server: {url} cannot be read: {error}") from error


def _named(adapters: Mapping[str, Any], folder: str) -> str:
    """The server's name for a folder: of its path, else its own."""
    real = os.path.realpath(folder)
    paths = (n for n, one in adapters.items() if os.path.realpath(one["path"]) == real)
    return next(paths, os.path.basename(real))


def _digests(
    folder: Path, model: Model, found: Sequence[Fate], dtype: torch.dtype
) -> dict[str, str]:
    """Sums by layer of what vLLM makes of a folder: factors in its dtype, B scaled."""
    config = LoraConfig.parse(read_json(file_in(folder, CONFIG_FILE)))
    values = []
    with open_weights(folder) as weights:
        for fate in found:
            if fate.what != "used" or fate.why == AGAIN:
                continue
            what, first, factor = _factor(weights[fate.key].read(), fate, model, config, dtype)
            values.append((fate.layer, fingerprint(factor, what, first)))
    return by_layer(values)


def _factor(
    tensor: Tensor, fate: Fate, model: Model, config: LoraConfig, dtype: torch.dtype
) -> tuple[str, int, Tensor]:
    """(what it is, first expert, factor) of a tensor, as vLLM holds it."""
    key = parse(fate.key)
    assert key is not None
    part = vllm_part(model, fate)
    expert, _, projection = part.rpartition(".")
    path = f".{projection}_proj" if projection and not expert else ""
    names = (name.removesuffix(".base_layer") + path for name in (key.path, key.module))
    _, scaling = config.rank_and_scaling(*names)
    factor = tensor.to(dtype)
    if key.side == "B" and scaling != 1:
        factor = factor * scaling
    what = f"{projection} {key.side}" if projection else key.side
    if projection and not expert:  # a stack, PEFT's
        count = model.experts[fate.layer].num_experts
        if key.side == "A":
            factor = factor.reshape(count, -1, factor.size(-1))
        else:
            factor = factor.reshape(factor.size(0), -1, count).permute(2, 0, 1)
    return what, int(expert or 0), factor


def _differences(ranks: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> Iterator[str]:
    held: dict[str, set[str]] = {}
    for rank in ranks:
        for layer, digest in rank["layers"].items():
            held.setdefault(layer, set()).add(digest)
    for layer, digest in wanted.items():
        if layer not in held:
            yield f"{layer} is not there"
        elif held[layer] != {digest}:
            yield f"{layer} has other factors"
    for layer in held.keys() - wanted.keys():
        yield f"{layer} has factors, and none in the folder"
    for what, said in (("unused", "no module uses the factors of"), ("empty", "the slot lacks")):
        if names := sorted({name for rank in ranks for name in rank[what]}):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{said} {names[0]}{more}"
