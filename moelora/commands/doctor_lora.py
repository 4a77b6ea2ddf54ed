"""`moelora doctor --lora`: which tensors of an adapter an engine uses, which layers they change.

Needs no GPU and no engine: names by the engines' rules, and a forward of a small model of the same
architecture.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from logging import CRITICAL
from pathlib import Path
from typing import Any

from moelora.adapters import load
from moelora.adapters.config import CONFIG_FILE
from moelora.adapters.engine_rules import AGAIN, Fate, Model, fates
from moelora.adapters.files import file_in, read_json
from moelora.adapters.folders import reading
from moelora.adapters.layers import Adapter
from moelora.adapters.weights import open_weights
from moelora.operators.terminal import printable

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
MOST = 12  # lines of a list


def run(args: argparse.Namespace) -> int:
    """Exit status 0: every tensor is used, and some layer changes; 1: not; 2: there is no adapter
    or no model, or the arguments are wrong."""
    try:
        shapes, config = reading(Path(args.lora), _read)
        empty, model = _model(args.model, config)
        engines: list[Any] = [args.engine] if args.engine else _installed()
        engines = ["vllm"] if args.server is not None else engines
        results = {
            engine: _of_transformers(args.lora, empty, shapes)
            if engine == "transformers"
            else fates(engine, model, shapes, config)
            for engine in engines
        }
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        print(f"moelora doctor: {printable(error)}", file=sys.stderr)
        return 2
    names = f"{len(model.experts)} layers of experts"
    print(f"{printable(args.lora)}: {len(shapes)} tensors; {model.model_type}, {names}")
    lost = False
    for engine, found in results.items():
        _say(_table(ENGINES[engine], found, len(shapes)))
        lost |= any(fate.what != "used" for fate in found)
    if args.server is not None:
        from moelora.commands.doctor_server import compare

        try:
            lines, same = compare(args.server, args.lora, model, results["vllm"])
        except (OSError, ValueError) as error:
            print(f"moelora doctor: {printable(error)}", file=sys.stderr)
            return 2
        _say(lines)
        return 1 if lost or not same else 0
    used = {fate.layer for found in results.values() for fate in found if fate.what == "used"}
    lines, works = _forward(args.lora, empty, model, used)
    _say(lines)
    return 1 if lost or not works else 0


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line))


def _read(folder: Path) -> tuple[dict[str, tuple[int, ...]], Mapping[str, Any]]:
    with open_weights(folder) as weights:
        shapes = {key: stored.shape for key, stored in weights.items()}
    if not shapes:
        raise ValueError(f"{folder} has no tensors")
    return shapes, read_json(file_in(folder, CONFIG_FILE))


def _model(given: str | None, config: Mapping[str, Any]) -> tuple[Any, Model]:
    """The model on the meta device, and what the rules read of it."""
    from moelora.integrations.transformers.empty import empty_layers

    base = given
    if base is None:
        base = str(config.get("base_model_name_or_path") or "")
        if not base or not Path(base, "config.json").is_file():
            name = base or "its base model, which the adapter does not name,"
            raise ValueError(f"--lora needs --model: {name} is no folder here with a config.json")
    empty, experts, linears = empty_layers(base)
    return empty, Model(
        empty.config.model_type,
        experts,
        {name: linear.layer for name, linear in linears.items() if not linear.refusal},
        empty.config.get_text_config().num_hidden_layers,
    )


def _installed() -> list[Any]:
    """The servers that are installed here; without any, all engines."""
    servers = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name)]
    return servers or [*ENGINES]


@contextmanager
def _quietly() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _of_transformers(folder: str, empty: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Fate]:
    """What transformers' own `load_adapter` does, with PEFT, on the meta device."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("--engine transformers asks transformers and PEFT: pip install peft")
    served = copy.deepcopy(empty)
    try:
        with _quietly():
            info = served.load_adapter(folder)
    except ImportError:
        raise
    except Exception as error:  # whatever PEFT makes of it
        why = f"load_adapter raises {type(error).__name__}: {str(error).splitlines()[0]:.200}"
        return [Fate(key, "refused", why=why) for key in sorted(shapes)]
    why = "load_adapter finds no module for it, and goes on"
    ignored = [Fate(key, "ignored", why=why) for key in sorted(info.unexpected_keys)]
    layers = sorted(_plain(name) for name, m in served.named_modules() if hasattr(m, "lora_A"))
    missing = {_plain(key.partition(".lora_")[0]) for key in info.missing_keys}
    used = [Fate("", "used", layer) for layer in layers if layer not in missing]
    return [*ignored, *used]


def _plain(name: str) -> str:
    return re.sub(r"(\.base_layer)+$", "", name)


def _table(engine: str, found: Sequence[Fate], count: int) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Fate]] = defaultdict(list)
    for fate in found:
        if fate.what != "used" or fate.why not in ("", AGAIN):
            groups[fate.what, re.sub(r"\d+", "N", fate.why)].append(fate)
    lost = sum(fate.what != "used" for fate in found)
    layers = len({fate.layer for fate in found if fate.what == "used"})
    yield f"{engine}: {count - lost} of {count} tensors are used, for {layers} layers"
    for first, *more in groups.values():
        like = f" and {len(more)} like it" if more else ""
        yield f"  {first.what}: {first.key}{like}: {first.why}"


def _forward(folder: str, empty: Any, model: Model, used: set[str]) -> tuple[list[str], bool]:
    """Which of the layers that an engine uses factors of differ in a forward, and whether one
    does."""
    from moelora.integrations.transformers.tiny import changed

    what = "small random weights, with the adapter and without"
    if not used:
        return [f"{what}: not run: no layer gets factors"], False
    try:
        adapter = load(folder, None, [*model.experts.values()], [*model.linears.values()])
        adapter = Adapter(
            {name: pairs for name, pairs in adapter.experts.items() if name in used},
            {name: pair for name, pair in adapter.linears.items() if name in used},
        )
    except (ValueError, OSError) as error:
        return [f"{what}: not run: {error}"], False
    try:
        with _quietly():
            reasons = changed(empty.config, adapter)
    except (ValueError, NotImplementedError) as error:
        return [f"{what}: not run: {error}"], True
    differ = [name for name, why in reasons.items() if not why]
    lines = [f"{what}: {len(differ)} of {len(reasons)} layers differ"]
    lines += [f"  {name}" for name in differ[:MOST]]
    if len(differ) > MOST:
        lines.append(f"  and {len(differ) - MOST} more")
    lines += [f"  {name} does not: {why}" for name, why in reasons.items() if why]
    return lines, bool(differ)
