"""moelora inside vLLM: mixture-of-experts layers and their LoRA adapters in one operator.

To install moelora is all: vLLM finds `register` among the entry points of the group
`vllm.general_plugins` and calls it in every process. From then on each unquantised MoE layer that
vLLM gives to its Triton experts runs `moelora.fused_experts_lora`, with adapters and without, and
every other layer runs as before. `MOELORA_VLLM=0` in the environment turns it off.

A layer that is not supported runs vLLM's own path, and the log, `vllm.moelora`, says why, once for
each reason; `TritonExpertsWithLoRA.reason_against` has them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

SWITCH = "MOELORA_VLLM"
OWN_PATH = "vLLM's own path runs"

log = logging.getLogger("vllm.moelora")  # below "vllm", whose handlers print it
_said: set[str] = set()


def say_once(message: str) -> None:
    """A line in vLLM's log, the first time only."""
    if message not in _said:
        _said.add(message)
        log.warning("moelora: %s", message)


def wrap(
    owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace `owner.name` by `make(owner.name)`, the first time only: plugins load repeatedly."""
    original = getattr(owner, name)
    if not hasattr(original, "_moelora"):
        replacement: Any = functools.wraps(original)(make(original))
        replacement._moelora = True
        setattr(owner, name, replacement)


def register() -> None:
    """Serve vLLM's MoE layers from now on in this process; nothing is raised if that cannot be."""
    if os.environ.get(SWITCH) == "0":
        log.info("moelora: off, as %s=0 says", SWITCH)
        return
    try:
        problem = _problem()
        if problem:
            say_once(f"{problem}; {OWN_PATH}")
        else:
            _install()
    except Exception:
        log.exception("moelora: could not register; %s", OWN_PATH)


def _problem() -> str | None:
    """Why this vLLM is left alone, or None."""
    from vllm.platforms import current_platform

    from moelora.integrations.vllm import interface

    problem = interface.version_problem()
    if problem is None and not current_platform.is_cuda():
        problem = "the platform is not CUDA"
    return problem or interface.problem()


def _install() -> None:
    """Every hook into vLLM.

    An operator for the adapters' product alone, for layers whose base stays with vLLM, has its
    place here too: it would wrap `add_lora_w13` and `add_lora_w2` of `PunicaWrapperGPU`, where
    vLLM's experts classes, the quantised ones included, meet.
    """
    from moelora.integrations.vllm import adapters, experts

    adapters.install()
    experts.install()
