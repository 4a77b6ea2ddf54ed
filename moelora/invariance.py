"""Batch invariance is always on; the functions that used to request it remain as no-ops."""

import warnings


def set_batch_invariant(on: bool = True) -> None:
    """Do nothing: every call is batch invariant. Deprecated, to be removed in the next release.

    The result of a row does not depend, bit for bit, on the other rows of the batch, their number
    or their order. For the guarantees see docs/batch-invariance.md.

    Parameters
    ----------
    on : bool
        Ignored.

    Raises
    ------
    TypeError
        `on` is neither True nor False.

    Warns
    -----
    DeprecationWarning
        Always.
    """
    if not isinstance(on, bool):
        raise TypeError(f"on is {on!r}, expected True or False")
    warnings.warn(
        "moelora.set_batch_invariant does nothing any more: every call is batch invariant; "
        "leave it out",
        DeprecationWarning,
        stacklevel=2,
    )


def is_batch_invariant() -> bool:
    """Return True: every call is batch invariant."""
    return True
