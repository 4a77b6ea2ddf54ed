"""Operators in Python whose bodies torch.compile calls instead of tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moelora.operators.schema import NAMESPACE, OPERATORS

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_bodies: dict[str, Callable[..., None]] = {}


def opaque(name: str, arguments: str, body: Callable[..., None]) -> Any:
    """Register `body` as an operator that returns nothing, and return the operator.

    `arguments` are those of its schema, which marks what it writes: "Tensor(a!) y, Tensor x". If it
    is registered already, `body` replaces the body.
    """
    if name not in _bodies:
        _library.define(f"{name}({arguments}) -> ()")
        _library.impl(name, lambda *args: _bodies[name](*args), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=_library)
    _bodies[name] = body
    return getattr(OPERATORS, name).default
