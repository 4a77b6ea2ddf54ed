"""Names of adapters: which ones a pool accepts, and that of rows without one."""

BASE = "__base__"  # PEFT's


def check_name(name: object) -> None:
    """Raises ValueError for what no adapter can be called."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}, wanted a non-empty string")
    if name == BASE:
        raise ValueError(f"name is {name!r}, which stands for no adapter; wanted another one")
