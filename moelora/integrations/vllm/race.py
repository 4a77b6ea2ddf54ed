"""On cards where moelora was not measured: time it beside vLLM at start-up, keep to the faster.

A race times both sides of a layer at three numbers of tokens, with adapters and without, and keeps
the table in a file of its own, which says of what it is:

    $XDG_CACHE_HOME/moelora/vllm/<hash of "of">.json      ~/.cache without that variable
    {"of": {card, driver, versions, format, shapes}, "rows": [[tokens, adapters, ours, theirs]]}

Seconds of one call. A file is written whole, under another name, and renamed, so that ranks may
write at once; one that is damaged or of something else is ignored, with a line in the log.

A call's side depends on its number of tokens, and on whether it has adapters: what a CUDA graph
is captured for. Races are run in eager calls only, of which vLLM's profiling run is the first; a
layer that is captured before any race stays with vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moelora import _C
from moelora.integrations import shown, switched_on
from moelora.integrations.vllm import SWITCH, say_once, travel
from moelora.operators.torch_private import driver_version

SIZES = (8, 128, 2048)  # tokens: decode of few, of many, prefill
BUDGET = 2.0  # seconds of timing in a process
SHARE = 0.04  # of one side of one row
NOISE = 1.02  # of two measurements of the same
MEASURED = ("H100", "H200")
MOST_BYTES = 1 << 16  # of a file

_tables: dict[str, Table] = {}
_spent = 0.0


class Sides(NamedTuple):
    """The same layer by moelora and by vLLM."""

    ours: Callable[[], object]
    theirs: Callable[[], object]


@dataclass
class Table:
    """Seconds of both sides, by tokens and whether they have adapters; `tried` has those that a
    race was run for in this process."""

    rows: dict[tuple[int, bool], tuple[float, float]] = field(default_factory=dict)
    tried: set[tuple[int, bool]] = field(default_factory=set)

    def is_ours(self, tokens: int, adapters: bool) -> bool:
        """Whether moelora is as fast at the nearest number of tokens; False without any."""
        near = [n for n, has in self.rows if has == adapters]
        if not near:
            return False
        size = min(near, key=lambda n: abs(math.log(n / max(tokens, 1))))
        ours, theirs = self.rows[size, adapters]
        return ours <= theirs

    def loses(self) -> bool:
        """Whether moelora is slower anywhere by more than noise, or nothing was measured."""
        rows = self.rows.values()
        return not rows or any(ours > NOISE * theirs for ours, theirs in rows)


@functools.cache
def wanted() -> bool:
    """Whether layers race: on cards other than those that moelora was measured on, or with the
    kernels of other cards (MOELORA_MAX_CC), unless MOELORA_VLLM=1."""
    return not switched_on(SWITCH) and torch.cuda.is_available() and not is_measured(_card())


def is_on() -> bool:
    """Whether calls race. Those with tokens of other data-parallel ranks do not: vLLM's kernels add
    the adapters of the rank's own batch alone."""
    return wanted() and not travel.is_on


def is_measured(card: str) -> bool:
    """Whether moelora was measured on a card, and takes that card's kernels."""
    limit = os.environ.get("MOELORA_MAX_CC", "").strip()
    limited = limit.isdigit() and 0 < int(limit) < 90
    return not limited and any(name in card for name in MEASURED)


@functools.cache
def _card() -> str:
    return torch.cuda.get_device_name()


def identity(format: str, **shapes: Any) -> dict[str, Any]:
    """What a table is of."""
    import vllm

    capability = torch.cuda.get_device_capability()
    return {
        "card": _card(),
        "capability": list(capability),
        "limit": os.environ.get("MOELORA_MAX_CC", ""),
        "driver": driver_version(),
        "torch": torch.__version__,
        "vllm": getattr(vllm, "__version__", "unknown"),
        "moelora": _C.version(),
        "format": format,
        "shapes": {name: str(value) for name, value in shapes.items()},
    }


def table(of: Mapping[str, Any]) -> Table:
    """The table of this process, at first that of the file."""
    name = _name(of)
    if name not in _tables:
        _tables[name] = _read(of)
    return _tables[name]


def race(
    of: Mapping[str, Any],
    found: Table,
    tokens: int,
    adapters: Iterable[bool],
    sides: Callable[[int, bool], Sides],
) -> None:
    """Time what a table lacks, of sizes up to `tokens`. Of a side that raises nothing is recorded:
    vLLM runs what was not timed."""
    every = {(size, has) for has in adapters for size in SIZES if size <= tokens}
    lacking = sorted(every - found.rows.keys() - found.tried)
    if not lacking or torch.cuda.is_current_stream_capturing():
        return
    found.tried.update(lacking)
    new = {}
    for tokens, has in lacking:
        try:
            if (seconds := _row(sides(tokens, has))) is not None:
                new[tokens, has] = seconds
        except Exception as error:  # of a side; the layer runs in vLLM
            say_once(f"{of['format']} layers were not timed at {tokens} tokens: {shown(error)}")
    if new:
        found.rows |= new
        _write(of, found)
        say_once(_line(of, found), logging.INFO)


def _row(sides: Sides) -> tuple[float, float] | None:
    """Seconds of both; None if the time for races is used up."""
    global _spent
    if _spent >= BUDGET:
        say_once("the time for races is used up: layers that were not timed stay with vLLM")
        return None
    sides.theirs()  # compiles and tunes, which vLLM needs in any case
    sides.ours()
    start = time.monotonic()
    try:
        theirs = measure(sides.theirs)
        return measure(sides.ours), min(theirs, measure(sides.theirs))
    finally:
        _spent += time.monotonic() - start


def measure(run: Callable[[], object]) -> float:
    """Seconds of one call on the GPU, from a graph: of a few tokens the host takes longer. The
    least of three."""
    graph, side, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # torch.cuda.graph would collect garbage, which takes long
        run()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    current.wait_stream(side)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count: int) -> float:
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / count

    once = timed(1)
    count = max(1, min(20, int(SHARE / 4 / max(once, 1e-6))))
    least = min(timed(count) for _ in range(3))
    graph.reset()
    return least


def _line(of: Mapping[str, Any], found: Table) -> str:
    """What runs where, and how much faster than the other side."""
    said = []
    for (tokens, has), (ours, theirs) in sorted(found.rows.items()):
        side = "moelora" if ours <= theirs else "vLLM"
        ratio = max(ours, theirs) / max(min(ours, theirs), 1e-9)
        said.append(f"{tokens}{' with adapters' if has else ''}: {side} ({ratio:.2f}x)")
    return (
        f"{of['format']} layers on {of['card']}, by tokens: {', '.join(said)}; {SWITCH}=1 takes "
        "moelora everywhere"
    )


# -- files --


def folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root, "moelora", "vllm")


def _name(of: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]


def _parsed(path: Path) -> tuple[dict[str, Any], Table]:
    """ValueError if it is no such file."""
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    content = json.loads(text) if len(text) <= MOST_BYTES else None
    if not isinstance(content, dict) or not isinstance(content.get("of"), dict):
        raise ValueError("it is no table of times")
    rows: dict[tuple[int, bool], tuple[float, float]] = {}
    for tokens, has, *seconds in content["rows"]:
        whole = type(tokens) is int and tokens > 0 and type(has) is bool and len(seconds) == 2
        if not whole or not all(isinstance(s, float) and 0 < s < 60 for s in seconds):
            raise ValueError("a row is not [tokens, adapters, seconds, seconds]")
        rows[tokens, has] = seconds[0], seconds[1]
    return content["of"], Table(rows)


def _read(of: Mapping[str, Any]) -> Table:
    path = folder() / f"{_name(of)}.json"
    try:
        kept, found = _parsed(path)
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        say_once(f"{path} is ignored: {shown(error)}")
        return Table()
    if kept != of:
        other = next((k for k in of if kept.get(k) != of[k]), "of")
        say_once(f"{path} is ignored: it is of {other} {kept.get(other)!r:.80}")
        return Table()
    return found


def _write(of: Mapping[str, Any], found: Table) -> None:
    path = folder() / f"{_name(of)}.json"
    rows = [[tokens, has, *seconds] for (tokens, has), seconds in sorted(found.rows.items())]
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"of": of, "rows": rows}, indent=1))
        os.replace(fresh, path)
    except OSError as error:
        say_once(f"{path} is not written, so the next start times layers again: {shown(error)}")


def report() -> list[str]:
    """Lines of `moelora doctor`: the tables of this card."""
    lines = []
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    for path in sorted(folder().glob("*.json")):
        try:
            of, found = _parsed(path)
            if card is None or of["card"] == card:
                lines.append(f"  {_line(of, found)} (vLLM {of['vllm']}, moelora {of['moelora']})")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            lines.append(f"  {path} is ignored: {shown(error)}")
    return lines
