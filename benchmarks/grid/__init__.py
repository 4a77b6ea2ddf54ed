"""The grid of comparisons of bits: every operator, on both sides of what chooses among its kernels.

A group is one problem and what is called on it: a function that draws it and yields (name, call).
A call returns all that the contract speaks of; what it writes to was filled before. Draws are of
this repository and the same for every build; of `moelora` only what is public is called, without
arguments that are absent, so that older builds take what they know.
"""

from collections.abc import Callable
from itertools import zip_longest

from benchmarks.grid import adapters, alignment, layers, quantized, training
from benchmarks.grid.calls import AROUND, BACK, BASE, DELTA, DTYPES, Calls, rows

__all__ = ["DELTA", "AROUND", "BACK", "BASE", "DTYPES", "FAMILIES", "groups", "rows"]

FAMILIES = {
    family.__name__: family
    for family in (
        *(layers.batches, layers.edges, layers.tops, layers.gemms, layers.packing),
        *(quantized.quantized, training.gradients),
        *(adapters.listed, adapters.stages, alignment.alignments, alignment.lists),
    )
}


def groups(device: str) -> dict[str, Callable[[], Calls]]:
    """All groups as "family name", interleaved so that the first few include every family."""
    families = ([(f"{name} {g}", c) for g, c in f(device)] for name, f in FAMILIES.items())
    return dict(group for turn in zip_longest(*families) for group in turn if group)
