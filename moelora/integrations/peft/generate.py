"""`generate` of an attached PEFT model, which has names for rows of the caller and for beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft

from moelora.integrations.peft.experts import AttachedExperts
from moelora.integrations.transformers.hooks import around


def _check_copies(kwargs: dict[str, Any], config: Any) -> None:
    """Raises ValueError if transformers makes more copies of each row than PEFT of each name."""
    beams, answers = (
        kwargs.get(name) or getattr(config, name, None) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    named = kwargs.get("num_beams") or 1
    if max(beams, answers) != named:
        which = "num_return_sequences" if answers > beams else "num_beams"
        remedy = (
            f"repeat each prompt and its name {answers} times, without num_return_sequences"
            if answers > beams
            else f"pass num_beams={beams} to generate, beside adapter_names"
        )
        raise ValueError(
            f"{which}={max(beams, answers)} with adapter_names: generate makes copies of each row, "
            f"and PEFT gives the names to the rows before; {remedy}"
        )


@around("generate", peft.PeftModel, peft.PeftModelForCausalLM, peft.PeftModelForSeq2SeqLM)
def _checked(generate: Callable[..., Any], self: peft.PeftModel, *args: Any, **kwargs: Any) -> Any:
    attached = isinstance(getattr(self.base_model, "_moelora", None), AttachedExperts)
    if attached and kwargs.get("adapter_names") is not None:
        _check_copies(
            kwargs, kwargs.get("generation_config") or getattr(self, "generation_config", None)
        )
    return generate(self, *args, **kwargs)
