"""A row's bits do not depend on its batch. What once asked for that is still taken."""

import warnings


def set_batch_invariant(on: bool = True) -> None:
    """Do nothing: every call is batch invariant. Deprecated, to be removed in the next release.

    A row has the bits that it has alone: neither which other rows there are, nor how many, nor
    their order changes one. What is promised: docs/batch-invariance.md.

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
