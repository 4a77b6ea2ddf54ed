r"""`rank_pattern` and `alpha_pattern`, matched as PEFT does and in bounded time.

PEFT uses the first key for which `re.match(rf"(.*\.)?({key})$", path)` holds. Configurations are
untrusted, and `re` backtracks: `(a+)+$` would hang the process. Keys are therefore limited to the
subset of regular expressions that configurations use:

    a  .  \.  \d \D \w \W \s \S  [a-z0-9_]  [^.]     one character
    ?  *  +  {m}  {m,}  {,n}  {m,n}                   its repetition, lazy ones (`*?`) too
    ( | )  (?: | )  ( )?                              choices; a group may be optional, not repeated
    ^  $                                              both ends of the path

Anything else is refused with its position in the key.

Sets of positions in a path are bits of one integer, bit n before character n. A part of a key maps
the positions where it may begin to those where it may end, all at once and without backtracking.
`re` itself matches character classes. The number of parts tried for all paths of a checkpoint is
limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NoReturn, TypeVar

MAX_LENGTH = 1024  # characters per key
MAX_DEPTH = 8  # nested groups
MAX_PARTS = 1 << 14  # of all keys: as many small regular expressions compile within a second
MAX_STEPS = 1 << 22  # parts tried for all paths of a checkpoint: seconds
_CLASS = 4  # cost of a part with classes, relative to plain ones
_CHARACTERS = 32  # characters of a part that count as one more

_NAME = re.compile(r"(\w|-|\\?\.)*")
_ATOM = re.compile(
    r"\\[dDwWsS]|\\[^A-Za-z0-9]|\[\^?(\w(-\w)?|\.|\\[dDwWsS.])+-?\]|[^][\\(){}*+?|^$]"
)
_CLASSES = re.compile(r"\[|\\[dDwWsS]")  # among atoms, as `.`
_TIMES = re.compile(r"([*+?]|\{([0-9]{1,4})(,?)([0-9]{0,4})\}|\{,([0-9]{1,4})\})\??(?![*+?{])")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Text:
    """A path, and the positions of a key's characters in it."""

    def __init__(self, text: str):
        self.text = text
        self.end = 1 << len(text)
        self.steps = 0
        self._found: dict[str | re.Pattern[str], int] = {}

    def places(self, what: str | re.Pattern[str]) -> int:
        """Positions at which `what`, a text or a look-ahead, matches."""
        self.steps += 1 if isinstance(what, str) else _CLASS
        if what not in self._found:
            places = 0
            if isinstance(what, str):
                at = self.text.find(what)
                while at >= 0:
                    places |= 1 << at
                    at = self.text.find(what, at + 1)
            else:
                places = sum(1 << match.start() for match in what.finditer(self.text))
            self._found[what] = places
        return self._found[what]


_Part = Callable[[_Text, int], int]


def _sought(atoms: list[str]) -> str | re.Pattern[str]:
    """Argument of `_Text.places`: a text if no atom is a class."""
    if all(atom != "." and not _CLASSES.match(atom) for atom in atoms):
        return "".join(atom[-1] for atom in atoms)  # without the backslash
    return re.compile(f"(?={''.join(atoms)})")


def _characters(atoms: list[str]) -> _Part:
    """One character per atom."""
    what, width = _sought(atoms), len(atoms)

    def part(text: _Text, starts: int) -> int:
        text.steps += width // _CHARACTERS
        return (starts & text.places(what)) << width

    return part


def _repeated(atom: str, least: int, most: int | None) -> _Part:
    what = _sought([atom])

    def part(text: _Text, starts: int) -> int:
        places = text.places(what)
        for _ in range(least):
            if not starts:
                break
            starts = (starts & places) << 1
            text.steps += 1
        if (
            most is None
        ):  # a carry propagates through each row of positions, to the one after its last
            return starts | ((starts & places) + places) ^ places
        ends = starts
        for _ in range(most - least):
            if not starts:
                break
            starts = (starts & places) << 1
            text.steps += 1
            ends |= starts
        return ends

    return part


def _sequence(parts: list[_Part]) -> _Part:
    def part(text: _Text, starts: int) -> int:
        text.steps += not parts  # each part counts its steps; no parts are one step
        for step in parts:
            if not starts:
                break
            starts = step(text, starts)
        return starts

    return part


def _choice(parts: list[_Part], is_optional: bool) -> _Part:
    def part(text: _Text, starts: int) -> int:
        ends = starts if is_optional else 0
        for choice in parts:
            ends |= choice(text, starts)
        return ends

    return part


class _Parser:
    """Parser of one key, from left to right."""

    def __init__(self, key: str):
        self.key, self.at = key, 0
        self.parts = 0  # so far

    def parse(self) -> _Part:
        try:
            part = _choice(self._alternatives(0), is_optional=False)
        except re.error:  # of characters: [b-a]
            self._refuse()
        if self.at < len(self.key):
            self._refuse()
        return part

    def _refuse(self) -> NoReturn:
        rest = self.key[self.at :] or "its end"
        raise ValueError(
            f"key {self.key!r:.80} is not understood from character {self.at} on, {rest!r:.40}; "
            "characters and classes, their repetition, and choices in groups, which may be "
            "optional but not repeated, are supported"
        )

    def _take(self, text: str) -> bool:
        taken = self.key.startswith(text, self.at)
        self.at += len(text) if taken else 0
        return taken

    def _alternatives(self, depth: int) -> list[_Part]:
        choices = [self._parts(depth)]
        while self._take("|"):
            choices.append(self._parts(depth))
        return choices

    def _parts(self, depth: int) -> _Part:
        parts: list[_Part] = []
        atoms: list[str] = []  # without a repetition
        while self.at < len(self.key) and self.key[self.at] not in "|)":
            atom = _ATOM.match(self.key, self.at)
            times = _TIMES.match(self.key, atom.end()) if atom else None
            if atom and not times:
                self.at = atom.end()
                atoms.append(atom[0])
                continue
            if atoms:
                parts.append(_characters(atoms))
                atoms = []
            if atom and times:
                parts.append(_repeated(atom[0], *self._counts(times)))
            else:
                parts.append(self._end_or_group(depth))
        if atoms:
            parts.append(_characters(atoms))
        self.parts += 1 + len(parts)
        return _sequence(parts)

    def _counts(self, times: re.Match[str]) -> tuple[int, int | None]:
        if times[1] in _COUNTS:
            counts = _COUNTS[times[1]]
        elif times[5]:
            counts = 0, int(times[5])
        else:
            least = int(times[2])
            counts = least, int(times[4]) if times[4] else None if times[3] else least
        if counts[1] is not None and counts[1] < counts[0]:
            self._refuse()
        self.at = times.end()
        return counts

    def _end_or_group(self, depth: int) -> _Part:
        if self._take("^"):
            return lambda text, starts: starts & 1
        if self._take("$"):
            return lambda text, starts: starts & text.end
        if depth == MAX_DEPTH or not self._take("("):
            self._refuse()
        self._take("?:")
        choices = self._alternatives(depth + 1)
        if not self._take(")"):
            self._refuse()
        is_optional = self._take("?")
        if is_optional:
            self._take("?")  # lazy: another order, the same matches
        return _choice(choices, is_optional)


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
        A key is not in the subset above, or the keys have too many parts.
    """

    def __init__(self, values: Mapping[str, V], option: str = "patterns"):
        self._option = option
        self._values = list(values.values())
        # Keys of plain characters and dots, which tools write for every module, are looked up by
        # length and positions of wildcard dots, so their number does not matter.
        self._names: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        self._parsed: list[tuple[int, _Part]] = []
        self._steps = 0
        self._found: dict[str, int | None] = {}
        count = 0
        for number, key in enumerate(values):
            if len(key) > MAX_LENGTH:
                raise ValueError(
                    f"key {key[:40]!r}... has {len(key)} characters, wanted at most {MAX_LENGTH}"
                )
            if _NAME.fullmatch(key):
                self._add_name(key, number)
                continue
            parser = _Parser(key)
            self._parsed.append((number, parser.parse()))
            count += parser.parts
            if count > MAX_PARTS:
                raise ValueError(
                    f"{len(values)} keys have more than {MAX_PARTS} parts, wanted fewer"
                )

    def _add_name(self, key: str, number: int) -> None:
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
            self._found[path] = min(self._matching(path), default=None)
            if self._steps > MAX_STEPS:
                raise ValueError(
                    f"{self._option}: trying {len(self._values)} keys for {len(self._found)} paths "
                    f"takes more than {MAX_STEPS} steps; give fewer or simpler keys"
                )
        number = self._found[path]
        return default if number is None else self._values[number]

    def _matching(self, path: str) -> Iterator[int]:
        for (length, wild), names in self._names.items():
            start = len(path) - length
            self._steps += 1 + len(wild) // _CHARACTERS
            if start == 0 or (start > 0 and path[start - 1] == "."):
                end = list(path[start:])
                for n in wild:
                    end[n] = "."
                if (number := names.get("".join(end))) is not None:
                    yield number
        if self._parsed:
            text = _Text(path)
            dots = (n + 1 for n, c in enumerate(path) if c == ".")
            starts = sum((1 << n for n in dots), start=1)
            for number, part in self._parsed:
                if part(text, starts) & text.end:
                    yield number
                    break
            self._steps += text.steps
