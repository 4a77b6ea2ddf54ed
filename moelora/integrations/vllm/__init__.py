"""moelora inside vLLM: mixture-of-experts layers and their LoRA adapters in one operator.

Installing moelora is sufficient: vLLM finds `register` among the entry points of the group
`vllm.general_plugins` and calls it in every process. From then on these MoE layers run
`moelora.fused_experts_lora`, with adapters and without: unquantized ones that vLLM gives to its
Triton experts, and MXFP4, INT4 (GPTQ, AWQ, compressed-tensors) and FP8 ones, whose weights are
converted to moelora's tiles instead of vLLM's layout. vLLM's log reports this once per process,
when the first layer runs.
Adapters of linear layers are added by moelora's deltas (`linear`).
`update_adapters` gives a running engine adapters from memory.
Where host memory has room for more adapters than the GPU, those of waiting requests are copied
while others run (`prefetch`): on one GPU, with `MOELORA_VLLM_PREFETCH=1` on several, with 0 never.
`MOELORA_VLLM=0` in the environment turns it off. On cards where moelora was not measured, layers
are timed at start-up and run where they are faster (`race`); `MOELORA_VLLM=1` forces moelora. Under
vLLM's VLLM_BATCH_INVARIANT every call is batch invariant.

If this build has no CUDA kernels, or no GPU can run them, vLLM is left unchanged, and the logger
`vllm.moelora` reports it in one line; `moelora doctor` reports it without an engine (`report`). A
layer that is not supported runs vLLM's own path; each reason, from
`TritonExpertsWithLoRA.reason_against` or `methods`, is logged once. Its adapters still use
moelora's deltas. Where a first launch in a worker fails or computes something else than the CPU
(`reason_against_device`), vLLM's own path runs both.

`interface` lists what is called or replaced of vLLM. Of its LoRA managers, `store` loads adapters
from memory and `loading` from files, `activation` writes slots, `layers` waits for them, `travel`
notes ids, and `prefetch` copies ahead.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from moelora import _C
from moelora.integrations import reason_against_build, shown, switched_off

SWITCH = "MOELORA_VLLM"
PREFETCH = "MOELORA_VLLM_PREFETCH"
OWN_PATH = "vLLM's own path runs"
UNEXPECTED = AttributeError, TypeError  # where an object of another release is read

__all__ = ["pack_adapters", "register", "share_tensors", "update_adapters", "update_adapters_async"]

log = logging.getLogger("vllm.moelora")  # below "vllm", whose handlers print it
_said: set[str] = set()
_wrapped: list[tuple[object, str, Any]] = []  # what `wrap` has replaced


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log a line in vLLM's log, the first time only."""
    if message not in _said:
        _said.add(message)
        log.log(level, "moelora: %s", message)


def say_served() -> None:
    """Log that moelora runs layers, when it runs the first one: in process, vLLM loads plugins
    before its log has a level and handlers."""
    say_once(f"version {_C.version()} runs MoE layers; {SWITCH}=0 leaves them", logging.INFO)


def unexpected(error: Exception) -> str:
    """The reason if an object of another release lacks what is read."""
    return f"the layer is not as expected ({shown(error)})"


def listed(factors: Any) -> list[Any]:
    """The factors of a module, which has one or several."""
    return list(factors) if isinstance(factors, (list, tuple)) else [factors]


def wrap(owner: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that gets it first, once: plugins load repeatedly."""
    original = getattr(owner, name)
    function = getattr(replacement, "func", replacement)  # of a functools.partial
    known, this = getattr(original, "_moelora", ()), f"{function.__module__}.{function.__name__}"
    if this not in known:

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        call._moelora = (*known, this)  # type: ignore[attr-defined]
        setattr(owner, name, call)
        _wrapped.append((owner, name, original))


def register() -> None:
    """Serve vLLM's MoE layers from now on in this process; failures are logged, not raised."""
    if said := switched_off(SWITCH):
        log.info("moelora: off, as %s says", said)
        return
    wrapped = len(_wrapped)
    try:
        problem = problem_here()
        if problem:
            say_once(f"{problem}; {OWN_PATH}")
        else:
            _install()
    except Exception as error:
        while len(_wrapped) > wrapped:  # all or nothing
            setattr(*_wrapped.pop())
        say_once(f"could not register: {shown(error)}; {OWN_PATH}", logging.ERROR)
        log.debug("moelora: could not register", exc_info=True)


def problem_here() -> str | None:
    """Why moelora is not installed into this vLLM, or None."""
    from vllm.platforms import current_platform

    from moelora.integrations.vllm import interface

    if not current_platform.is_cuda():
        return "the platform is not CUDA"
    if reason := reason_against_build():
        return reason
    if not current_platform.has_device_capability(80):  # asks NVML: CUDA stays uninitialized
        return "there is no GPU of compute capability 8.0 or newer"
    return interface.problem(interface.LAYERS)


def _install() -> None:
    """Install the hooks of every part whose API this vLLM has."""
    from moelora.integrations.vllm import (
        adapters,
        experts,
        interface,
        layers,
        linear,
        prefetch,
        travel,
    )

    adapters.install()
    experts.install()
    needed = {  # {module: (what it needs of vLLM, what happens without)}
        "deltas": (interface.DELTAS, "vLLM's own kernels add the adapters of its layers"),
        "linear": (interface.LINEAR, linear.OWN_KERNELS),
        "configs": (
            interface.CONFIGS,
            "no warning for adapters whose columns are not in PEFT's order",
        ),
        "update": (interface.UPDATES, "update_adapters is off"),
        "digests": (interface.UPDATES, "update_adapters is off"),
        "loading": (interface.LOADING, "vLLM reads adapter files by itself"),
        "prefetch": (interface.PREFETCH, prefetch.OWN_COPIES),
        "layers": (interface.PER_LAYER, f"with prefetch {layers.WHOLE}"),
        "methods": (interface.QUANTIZED, f"{OWN_PATH} for quantized layers"),
    }
    if switched_off(PREFETCH):
        del needed["prefetch"], needed["layers"]
    for name, (part, otherwise) in needed.items():
        why_not = linear.off_here() if name == "linear" else None
        if problem := why_not or interface.problem(part):
            say_once(f"{problem}; {otherwise}")
        else:
            importlib.import_module(f"{__name__}.{name}").install()
    if problem := interface.problem(interface.TRAVEL):
        adapters.ranks_mix = problem
    else:
        travel.install()


from moelora.integrations.vllm.handles import share_tensors  # noqa: E402
from moelora.integrations.vllm.route import pack_adapters  # noqa: E402
from moelora.integrations.vllm.update import (  # noqa: E402 # which wraps by the functions above
    update_adapters,
    update_adapters_async,
)
