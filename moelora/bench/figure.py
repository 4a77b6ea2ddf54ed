"""Figures of matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """A figure of this size in inches; ImportError says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'moelora[plot]'") from None
    return Figure(figsize=(width, height), **options)


def save(figure: Figure, out: str) -> Path:
    """Write a picture. A PNG does not name the release of matplotlib, so that it changes only with
    its data."""
    figure.savefig(out, dpi=120, metadata={"Software": None} if out.endswith(".png") else None)
    return Path(out)
