"""Expand what docstrings share (moelora/operators/docstrings.py) in the API reference."""

import importlib.util
from pathlib import Path

import griffe

SOURCE = Path(__file__).resolve().parents[1] / "moelora/operators/docstrings.py"


def _load():
    spec = importlib.util.spec_from_file_location("docstrings", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SharedDocstrings(griffe.Extension):
    """Expands those of functions."""

    def __init__(self):
        self.expand = _load().expand

    def on_function(self, *, func, **_):
        if func.docstring:
            func.docstring.value = self.expand(func.docstring.value)
