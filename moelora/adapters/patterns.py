r"""`rank_pattern` and `alpha_pattern`, matched as PEFT does and in bounded time.

PEFT uses the first key for which `re.match(rf"(.*\.)?({key})$", path)` holds. Configurations are
untrusted, and `re` backtracks without end: `(a+)+$` would hang the process. So `re` only says what
is a regular expression, and the package regex, which takes a limit of time, matches it.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

MAX_LENGTH = 1024  # characters per key
SECONDS = 20.0  # of this thread, for all keys and paths of an option

_NAME = re.compile(r"(\w|-|\\?\.)*")
_OTHER = re.compile(r"\{(?![0-9]*,?[0-9]*\})|\[\[:")  # of which regex makes more than re

V = TypeVar("V")


class Patterns(Generic[V]):
    """One option of a checkpoint: values by key, in matching order.

    Parameters
    ----------
    values : mapping
        Value of each key.
    option : str
        Name in messages.

    Raises
    ------
    ValueError
        A key is no regular expression, or the keys take too long to read.
    """

    def __init__(self, values: Mapping[str, V], option: str = "patterns"):
        self._option = option
        self._values = list(values.values())
        # Keys of plain characters and dots, which tools write for every module, are looked up by
        # length and positions of wildcard dots, so their number does not matter.
        self._names: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        self._compiled: list[tuple[int, Any]] = []
        self._left = SECONDS
        self._found: dict[str, int | None] = {}
        for number, key in enumerate(values):
            if len(key) > MAX_LENGTH:
                raise ValueError(
                    f"key {key[:40]!r}... has {len(key)} characters, wanted at most {MAX_LENGTH}"
                )
            if not _NAME.fullmatch(key):
                with self._limited():
                    self._compiled.append((number, _compiled(key)))
                continue
            # A backslash replaces an escaped dot, so that lengths are those of paths.
            text = re.sub(r"\\.", r"\\", key, flags=re.DOTALL)
            wild = tuple(n for n, c in enumerate(text) if c == ".")
            names = self._names.setdefault((len(text), wild), {})
            names.setdefault(text.replace("\\", "."), number)

    def find(self, path: str, default: V) -> V:
        """Value of the first key that matches `path`, or its end after a dot.

        `path` must be a single line.

        Raises
        ------
        ValueError
            Matching all paths so far has exceeded the limit.
        """
        if path not in self._found:
            with self._limited():
                self._found[path] = min(self._matching(path), default=None)
        number = self._found[path]
        return default if number is None else self._values[number]

    def _matching(self, path: str) -> Iterator[int]:
        for (length, wild), names in self._names.items():
            start = len(path) - length
            if start == 0 or (start > 0 and path[start - 1] == "."):
                end = list(path[start:])
                for n in wild:
                    end[n] = "."
                if (number := names.get("".join(end))) is not None:
                    yield number
        for number, pattern in self._compiled:
            if pattern.match(path, timeout=self._left):
                yield number
                break

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Subtracts the time of this thread from what is left."""
        begun = time.thread_time()
        try:
            yield
        except TimeoutError:
            self._left = 0.0
        self._left -= time.thread_time() - begun
        if self._left <= 0:
            raise ValueError(
                f"{self._option}: trying {len(self._values)} keys for {len(self._found)} paths "
                f"takes more than {SECONDS:g} seconds; give fewer or simpler keys"
            )


def _compiled(key: str) -> Any:
    """The pattern of a key; ValueError for what `re` does not take, or takes otherwise."""
    try:
        import regex
    except ModuleNotFoundError:
        raise ImportError(f"reading the key {key!r:.80} needs regex: pip install regex") from None
    whole = rf"(.*\.)?({key})$"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets within sets, which no version of re has yet
            re.compile(whole)
        if other := _OTHER.search(key):
            raise ValueError(f"{other[0]!r} is not read")
        return regex.compile(whole)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"key {key!r:.80} is no regular expression: {error!s:.200}") from None
