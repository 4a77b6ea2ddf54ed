"""Warn about adapters that vLLM interprets incorrectly, when their configurations are loaded.

vLLM always reads the columns of `lora_B` of an expert stack in PEFT's order. Loading is vLLM's
responsibility, so nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moelora.adapters.columns import MARK, Columns
from moelora.integrations.vllm import say_once, wrap


def install() -> None:
    from vllm.lora.peft_helper import PEFTHelper

    wrap(PEFTHelper, "from_dict", _telling)


def warning(config: Mapping[str, Any]) -> str | None:
    """How vLLM misreads an adapter with this configuration, or None."""
    try:
        columns = Columns.parse(config)
    except ValueError as error:
        why = str(error)
    else:
        if columns.peft_order:
            return None
        why = columns.doubt or f"{MARK} of its configuration is not rank_major"
    model = str(config.get("base_model_name_or_path") or "a model")
    return (
        f"an adapter of {model:.200}: {why}. vLLM assumes PEFT's order: every expert will get "
        "columns of other experts; save the adapter again in PEFT's order"
    )


def _telling(from_dict: Callable[..., Any], config_dict: Any, *args: Any, **kwargs: Any) -> Any:
    helper = from_dict(config_dict, *args, **kwargs)
    if isinstance(config_dict, Mapping) and (text := warning(config_dict)):
        say_once(text)
    return helper
