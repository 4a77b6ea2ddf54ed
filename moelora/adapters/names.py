"""Names of adapters: which ones a pool accepts, and that of rows without one."""

from collections.abc import Iterable

BASE = "__base__"  # PEFT's


def listed(names: Iterable[str | None]) -> list[str | None]:
    """Names as a list; ValueError for a string, of which each character would be one."""
    if isinstance(names, str):
        raise ValueError(f"names is the string {names!r}, wanted a list of names")
    return list(names)


def distinct(names: Iterable[str | None]) -> list[str]:
    """The adapters that `names` names, without repetitions, in the order of the first ones."""
    return [name for name in dict.fromkeys(listed(names)) if name is not None]


def check_name(name: object) -> None:
    """Raises ValueError for what no adapter can be called."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}, wanted a non-empty string")
    if name == BASE:
        raise ValueError(f"name is {name!r}, which stands for no adapter; wanted another one")
