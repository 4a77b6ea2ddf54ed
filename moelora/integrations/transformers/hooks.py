"""Replace methods of other libraries' classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def around(name: str, *owners: Any) -> Callable[[F], F]:
    """Replace `name` of classes or modules by the decorated function, which gets the original
    first; the signature stays that of the original."""

    def install(replacement: F) -> F:
        for owner in owners:
            original = getattr(owner, name)
            call = _calling(replacement, original)
            setattr(owner, name, functools.wraps(original)(call))
        return replacement

    return install


def _calling(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: replacement(original, *args, **kwargs)
