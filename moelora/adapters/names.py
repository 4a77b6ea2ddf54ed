"""Names of adapters: which ones a pool accepts, and that of rows without one."""

import re
from collections.abc import Iterable

BASE = "__base__"  # PEFT's


def is_called(name: str, target: str) -> bool:
    """Whether a layer is `target`, by its name or the end of it."""
    return name == target or name.endswith(f".{target}")


def listed(names: Iterable[str | None]) -> list[str | None]:
    """Names as a list; ValueError for a string, of which each character would be one."""
    if isinstance(names, str):
        raise ValueError(f"names is the string {names!r}, wanted a list of names")
    if not isinstance(names, Iterable):
        raise ValueError(f"names is {names!r}, wanted a list of names")
    return list(names)


def distinct(names: Iterable[str | None]) -> list[str]:
    """The adapters that `names` names, without repetitions, in the order of the first ones.

    ValueError for what is neither a string nor None.
    """
    every = listed(names)
    try:
        once = dict.fromkeys(every)
    except TypeError:  # what cannot be hashed is no string
        once = {id(name): name for name in every}.values()
    for name in once:
        if name is not None and not isinstance(name, str):
            raise ValueError(f"names has {name!r:.80}, wanted names of adapters, None for none")
    return [name for name in once if name is not None]


def check_name(name: object) -> None:
    """Raises ValueError for what no adapter can be called."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r:.80}, wanted a non-empty string")
    if re.search(r"[\x00-\x1f\x7f-\x9f]", name):
        raise ValueError(f"name is {name!r:.80}, wanted one without control characters")
    if name == BASE:
        raise ValueError(f"name is {name!r}, which stands for no adapter; wanted another one")
