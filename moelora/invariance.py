"""Whether a row's bits may depend on the batch that it is in."""

from moelora import _C

_on = _C.is_batch_invariant()  # MOELORA_BATCH_INVARIANT


def set_batch_invariant(on: bool = True) -> None:
    """Have every call of this process be batch invariant, or only those that ask for it.

    A row of a batch-invariant call has the bits that it has alone: neither which other rows there
    are, nor how many, nor their order changes one. What is promised, and what it costs:
    docs/batch-invariance.md.

    Parameters
    ----------
    on : bool
        False: calls with `batch_invariant=True` alone, as at start without the environment variable
        MOELORA_BATCH_INVARIANT=1.

    Raises
    ------
    TypeError
        `on` is neither True nor False.

    Notes
    -----
    Counts for calls from now on, in functions that torch.compile has traced, too. A captured CUDA
    graph stays as it is.
    """
    global _on
    if not isinstance(on, bool):
        raise TypeError(f"on is {on!r}, expected True or False")
    _C.set_batch_invariant(on)
    _on = on


def is_batch_invariant() -> bool:
    """True if every call is batch invariant."""
    return _on
