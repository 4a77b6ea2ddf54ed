"""Replace methods of other libraries' classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def around(name: str, *owners: Any, optional: bool = False) -> Callable[[F], F]:
    """Replace `name` of classes or modules by the decorated function, which gets the original
    first; the signature stays that of the original. `optional`: where all of them have it."""

    def install(replacement: F) -> F:
        for owner in owners if not optional or all(hasattr(o, name) for o in owners) else ():
            setattr(owner, name, _calling(replacement, getattr(owner, name)))
        return replacement

    return install


def _calling(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return call
