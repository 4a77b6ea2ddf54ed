"""An attribute that has another value within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, an attribute of `owner` has this value; one that is absent is None after.

    A Ctrl-C as the context ends can leave the value until the traceback is dropped: where that
    matters, use try and finally.
    """
    before = getattr(owner, name, None)
    try:
        setattr(owner, name, value)
        yield
    finally:
        setattr(owner, name, before)
