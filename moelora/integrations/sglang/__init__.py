"""moelora inside SGLang: a MoE layer and its LoRA adapters in one operator.

Installing moelora is enough: SGLang loads `register` from the entry points of the group
`sglang.srt.plugins` in every process. From then on the MoE layers of

    python -m sglang.launch_server --enable-lora --moe-runner-backend triton ...
    python -m sglang.launch_server --enable-lora --lora-backend triton_v2 \\
        --moe-runner-backend lora_triton ...  # from 0.5.23 on

run `moelora.fused_experts_lora` on SGLang's weights, adapter buffers and slots, also in CUDA
graphs, and the log says so. `MOELORA_SGLANG=0` in the environment disables it.

If this build has no CUDA kernels, or there is no GPU to run them, SGLang is unchanged, and the log,
`sglang.moelora`, says so. Unsupported layers (clamped activations, biases, quantized weights other
than `quantized.KINDS` under `triton_v2`; see `reason_against`) run SGLang's own path, and the log
states each reason once.

`experts_with_lora` is just the layer, for other engines with such buffers.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from moelora import _C
from moelora.integrations import reason_against_build, reason_against_device, shown, switched_off
from moelora.integrations.sglang import interface
from moelora.integrations.sglang.layer import MoeLoraRunner, experts_with_lora, reason_against
from moelora.integrations.sglang.legacy import LegacyRunner, reason_against_layer

__all__ = ["LegacyRunner", "MoeLoraRunner", "experts_with_lora", "reason_against", "register"]

SWITCH = "MOELORA_SGLANG"
BASE_PATH = "_base_run_moe_core"  # what a layer of `triton_v2` calls for a batch without adapters

log = logging.getLogger("sglang.moelora")


@functools.cache
def _say(reason: str) -> None:
    log.warning("moelora: %s; SGLang's own path runs", reason)


@functools.cache
def _tell(what: str) -> None:
    log.info("moelora: %s", what)


def _runner(
    needed: interface.Interface,
    reason_against: Callable[[Any], str | None],
    make: Callable[[Any], Any],
    layer: Any,
) -> Any:
    """moelora's runner of a layer, or None if it stays with SGLang; the log says which.

    Whatever fails here is a reason to leave the layer to SGLang, as in a release with another
    interface.
    """
    runner = None
    try:
        reason = reason_against_device() or interface.problem(needed) or reason_against(layer)
        if reason is None:
            runner = make(layer)
    except (NotImplementedError, ValueError) as refusal:  # of what quantized weights hold
        reason = str(refusal)
    except Exception as error:
        reason = f"it is not as expected ({shown(error)})"
    if reason is None:  # SGLang has no log yet when it loads plugins
        _tell(f"version {_C.version()} runs MoE layers with LoRA; {SWITCH}=0 leaves them")
    else:
        _say(f"a MoE layer is not supported: {reason}")
    return runner


def from_layer(
    original: Callable[..., Any], cls: type, base_layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps SGLang's `MoeLoraRunner.from_layer`: returns moelora's runner for supported layers."""
    make = functools.partial(original, cls, base_layer, *args, **kwargs)
    runner = _runner(interface.TRITON_V2, reason_against, MoeLoraRunner, base_layer)
    if runner is None:
        return make()
    if runner.tiles is None:
        runner.run_own = _own_path(make)
    return runner


def _own_path(make: Callable[[], Any]) -> Callable[[str, Any, Any], Any] | None:
    """Runs a batch that moelora refuses in SGLang's own runner; None if SGLang refuses the layer.

    The runner is made with the layer: the first refusal may come while a CUDA graph is captured, in
    which nothing can be compiled.
    """
    try:
        own = make()
    except Exception as error:
        _tell(f"SGLang has no runner of its own for a MoE layer: {shown(error)}")
        return None

    def run_own(reason: str, dispatch_output: Any, batch: Any) -> Any:
        _say(f"a batch is not supported: {reason}")
        return own.run(dispatch_output, batch)

    return run_own


def after_initialize(result: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after `FusedMoEWithLoRA.__init__`: sets the source of true ranks, or the runner."""
    runner = getattr(layer, "_moe_lora_runner", None)  # only with lora_* backends
    if isinstance(runner, MoeLoraRunner):
        runner.lora_backend = getattr(layer, "lora_backend", None)
        if runner.tiles:  # a batch without adapters' slots would read the loader's weights
            if not hasattr(layer, BASE_PATH):
                raise RuntimeError(
                    f"moelora: a layer of this SGLang has no {BASE_PATH}, and its weights are "
                    f"packed; start SGLang with {SWITCH}=0"
                )
            setattr(layer, BASE_PATH, runner.run_base)
    if getattr(layer, "_lora_runner", None) is None:
        return
    make = functools.partial(LegacyRunner, say=_say)
    legacy = _runner(interface.LEGACY, reason_against_layer, make, layer)
    if legacy is not None:
        layer._lora_runner = legacy


def register() -> None:
    """SGLang's plugin entry point: from now on, run its MoE LoRA layers in moelora."""
    if said := switched_off(SWITCH):
        log.info("moelora: off, as %s says", said)
        return
    try:
        if reason := problem_here():
            _say(reason)
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if _exists(interface.RUNNER):
            target = f"{interface.RUNNER}.MoeLoraRunner.from_layer"
            HookRegistry.register(target, from_layer, HookType.AROUND)
        HookRegistry.register(f"{interface.LAYER}.__init__", after_initialize, HookType.AFTER)
    except Exception as error:
        _say(f"could not register: {shown(error)}")


def problem_here() -> str | None:
    """Why moelora is not installed into SGLang, or None."""
    if reason := reason_against_build():
        return reason
    if not torch.cuda.device_count():
        return "there is no GPU"
    return interface.problem(interface.HOOKS)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package
        return False
