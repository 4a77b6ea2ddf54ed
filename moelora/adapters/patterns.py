"""`rank_pattern` and `alpha_pattern`, matched as PEFT does and in bounded time.

PEFT takes the first key for which `re.match(rf"(.*\\.)?({key})$", path)` holds. A configuration is
not trusted, and `re` backtracks: `(a+)+$` would stop the process for good. So keys are regular
expressions of a part of the language in which a match takes one pass:

    a  .  \\.  \\d \\D \\w \\W \\s \\S  [a-z0-9_]  [^.]     one character
    ( )  (?: )  |                                     groups and choices
    ?  *  +  {m}  {m,}  {,n}  {m,n}                   repetition, lazy ones (`*?`) too
    ^  $                                              both ends of the path

A repeated group may hold no repetition but `?`: without nesting, the places that a repetition
reaches are found in as many steps as the path has characters. Anything else is refused by name.

Places in a path are the bits of one integer, bit n before character n. A part of a pattern maps
the places where it may begin to those where it may end, all of them at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

MAX_LENGTH = 1024  # characters of a key
MAX_DEPTH = 16  # groups in each other
MAX_COST = 1 << 13  # parts to try for one path, by all keys together: milliseconds
_ENDLESS = 64  # what `*` counts for in the cost: the characters of a long path
_SHAPE = 16  # and what looking a path up among names of one shape takes, in parts

_NAME = re.compile(r"(\w|-|\\?\.)*")
_COUNT = re.compile(r"\{([0-9]{0,4})(,?)([0-9]{0,4})\}")
_CLASSES = {"d": str.isdecimal, "w": lambda c: c.isalnum() or c == "_", "s": str.isspace}


class _Text:
    """A path and, for each of its characters, the bits before which it stands."""

    def __init__(self, text: str):
        self.end = 1 << len(text)
        self.bits: dict[str, int] = {}
        self.accepted: dict[_Test, int] = {}
        for n, c in enumerate(text):
            self.bits[c] = self.bits.get(c, 0) | 1 << n


_Test = Callable[[str], bool]
_Part = Callable[[_Text, int], int]


def _one(accepts: _Test) -> _Part:
    def part(text: _Text, starts: int) -> int:
        if accepts not in text.accepted:
            text.accepted[accepts] = sum(bits for c, bits in text.bits.items() if accepts(c))
        return (starts & text.accepted[accepts]) << 1

    return part


def _character(c: str) -> _Part:
    return lambda text, starts: (starts & text.bits.get(c, 0)) << 1


def _any(text: _Text, starts: int) -> int:
    return starts << 1 & (text.end << 1) - 1


def _sequence(parts: list[_Part]) -> _Part:
    def part(text: _Text, starts: int) -> int:
        for step in parts:
            if not starts:
                break
            starts = step(text, starts)
        return starts

    return part


def _choice(parts: list[_Part]) -> _Part:
    def part(text: _Text, starts: int) -> int:
        ends = 0
        for choice in parts:
            ends |= choice(text, starts)
        return ends

    return part


def _repeated(step: _Part, least: int, most: int | None) -> _Part:
    def part(text: _Text, starts: int) -> int:
        for _ in range(least):
            starts = step(text, starts)
        ends, times = starts, least
        while starts and times != most:  # only from places that are new
            starts = step(text, starts) & ~ends
            ends |= starts
            times += 1
        return ends

    return part


class _Parser:
    """One key, read from left to right; `cost` is how many parts a match tries at most."""

    def __init__(self, key: str):
        self.key, self.at = key, 0

    def parse(self) -> tuple[_Part, int]:
        part, cost, _ = self._alternatives(0)
        if self.at < len(self.key):
            raise self._refused("a ) without its (")
        return part, cost

    def _refused(self, what: str) -> ValueError:
        return ValueError(f"{what} at character {self.at}")

    def _take(self, text: str) -> bool:
        taken = self.key.startswith(text, self.at)
        self.at += len(text) if taken else 0
        return taken

    def _alternatives(self, depth: int) -> tuple[_Part, int, bool]:
        """A part, its cost, and whether it repeats anything."""
        choices: list[_Part] = []
        cost, repeats = 0, False
        while not choices or self._take("|"):
            parts = []
            while self.at < len(self.key) and self.key[self.at] not in "|)":
                part, more, repeated = self._factor(depth)
                parts.append(part)
                cost, repeats = cost + more, repeats or repeated
            choices.append(_sequence(parts))
            cost += 1
        return choices[0] if len(choices) == 1 else _choice(choices), cost, repeats

    def _factor(self, depth: int) -> tuple[_Part, int, bool]:
        """One character, group or end of the path, with its repetition."""
        start = self.at
        if self.key[start] in "^$":
            self.at += 1
            if self._repetition() is not None:
                raise self._refused("a repeated ^ or $")
            if self.key[start] == "^":
                return (lambda text, starts: starts & 1), 1, False
            return (lambda text, starts: starts & text.end), 1, False
        if self._take("("):
            if self._take("?") and not self._take(":"):
                raise self._refused("an extension of groups, (?")
            if depth == MAX_DEPTH:
                raise self._refused(f"more than {MAX_DEPTH} groups in each other")
            part, cost, repeats = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._refused("a ( without its )")
        else:
            part, cost, repeats = self._one(), 1, False
        counts = self._repetition()
        if counts is None:
            return part, cost, repeats
        least, most = counts
        if counts != (0, 1):
            if repeats:
                self.at = start
                raise self._refused("a repetition inside a repetition")
            repeats = True
        times = max(least, _ENDLESS if most is None else most)
        return _repeated(part, least, most), cost * times, repeats

    def _repetition(self) -> tuple[int, int | None] | None:
        counts: tuple[int, int | None]
        if self._take("?"):
            counts = (0, 1)
        elif self._take("*"):
            counts = (0, None)
        elif self._take("+"):
            counts = (1, None)
        elif (match := _COUNT.match(self.key, self.at)) and match[0] not in ("{}", "{,}"):
            self.at = match.end()
            least = int(match[1] or 0)
            most = int(match[3]) if match[3] else None if match[2] else least
            if most is not None and most < least:
                raise self._refused("a count whose largest is less than its least")
            counts = (least, most)
        else:
            return None
        self._take("?")  # lazy: another order, the same matches
        if self.at < len(self.key) and self.key[self.at] in "?*+{":
            raise self._refused("a second repetition")
        return counts

    def _one(self) -> _Part:
        c = self.key[self.at]
        self.at += 1
        if c == ".":
            return _any
        if c == "[":
            return _one(self._set())
        if c == "\\":
            accepts = self._escape()
            return _character(accepts) if isinstance(accepts, str) else _one(accepts)
        if c in "*+?{}]":
            self.at -= 1
            raise self._refused(f"{c!r} without its meaning")
        return _character(c)

    def _escape(self) -> str | _Test:
        """What follows a backslash: a character, or the test of a class."""
        c = self.key[self.at : self.at + 1]
        self.at += 1
        if c.lower() in _CLASSES:
            test = _CLASSES[c.lower()]
            return test if c.islower() else lambda other: not test(other)
        if not c or c.isalnum() or not c.isascii():
            self.at -= 2
            raise self._refused(f"the escape \\{c}")
        return c

    def _set(self) -> _Test:
        """What [...] accepts: characters, ranges, classes."""
        negated = self._take("^")
        tests: list[_Test] = []
        characters, ranges = set(), []
        while not self._take("]"):
            low = self._member()
            ahead = self.key[self.at : self.at + 2]
            if ahead.startswith("-") and ahead != "-]":
                self.at += 1
                high = self._member()
                if callable(low) or callable(high) or high < low:
                    raise self._refused("a range that is none")
                ranges.append((low, high))
            elif callable(low):
                tests.append(low)
            else:
                characters.add(low)
        if not tests and not characters and not ranges:
            raise self._refused("an empty []")

        def accepts(c: str) -> bool:
            inside = c in characters or any(low <= c <= high for low, high in ranges)
            return (inside or any(test(c) for test in tests)) != negated

        return accepts

    def _member(self) -> str | _Test:
        c = self.key[self.at : self.at + 1]
        if not c:
            raise self._refused("a [ without its ]")
        self.at += 1
        return self._escape() if c == "\\" else c


V = TypeVar("V")


class Patterns(Generic[V]):
    """One option: values by key, in the order in which keys are tried.

    Raises
    ------
    ValueError
        A key is not in the language above, or all together take too long to try.
    """

    def __init__(self, values: Mapping[str, V]):
        self._values = list(values.values())
        # Keys of characters and dots, as tools write them for every module, are looked up: by their
        # length and the places of dots that stand for any character, so that their number is free.
        self._names: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        self._parsed: list[tuple[int, _Part]] = []
        cost = 0
        for number, key in enumerate(values):
            if len(key) > MAX_LENGTH:
                raise ValueError(
                    f"key {key[:40]!r}... has {len(key)} characters, wanted at most {MAX_LENGTH}"
                )
            if _NAME.fullmatch(key):
                self._add_name(key, number)
                continue
            try:
                part, more = _Parser(key).parse()
            except ValueError as error:
                raise ValueError(
                    f"key {key!r} holds {error}; patterns of characters, classes, choices and "
                    "repetitions that are not nested are supported"
                ) from None
            self._parsed.append((number, part))
            cost += more
        cost += sum(_SHAPE + len(wild) for _, wild in self._names)
        if cost > MAX_COST:
            raise ValueError(
                f"{len(values)} keys take {cost} steps for a path, wanted at most {MAX_COST}"
            )

    def _add_name(self, key: str, number: int) -> None:
        # A backslash stands in for an escaped dot, so that lengths are those of paths.
        text = re.sub(r"\\.", r"\\", key, flags=re.DOTALL)
        wild = tuple(n for n, c in enumerate(text) if c == ".")
        names = self._names.setdefault((len(text), wild), {})
        names.setdefault(text.replace("\\", "."), number)

    def find(self, path: str, default: V) -> V:
        """The value of the first key that matches the end of `path`, whole or behind a dot.

        `path` is one line.
        """
        return self._values[min(found)] if (found := list(self._matching(path))) else default

    def _matching(self, path: str) -> Iterator[int]:
        for (length, wild), names in self._names.items():
            start = len(path) - length
            if start == 0 or (start > 0 and path[start - 1] == "."):
                end = list(path[start:])
                for n in wild:
                    end[n] = "."
                if (number := names.get("".join(end))) is not None:
                    yield number
        if self._parsed:
            text = _Text(path)
            starts = (1 | text.bits.get(".", 0) << 1) & (text.end << 1) - 1
            for number, part in self._parsed:
                if part(text, starts) & text.end:
                    yield number
                    return

    def values(self) -> list[V]:
        return self._values
