"""Integrations into other libraries, one package each. Importing them does not require the library.

`import moelora` imports the operators of `vllm` and `sglang`, which take these engines' arguments
and only handle tensors. Everything else is imported on demand.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch

from moelora import _C


def switched_off(switch: str) -> str | None:
    """NAME=VALUE of an environment variable that turns a plugin off: 0, false, off or no."""
    value = os.environ.get(switch, "")
    return f"{switch}={value}" if value.strip().lower() in ("0", "false", "off", "no") else None


def switched_on(switch: str) -> bool:
    """Whether an environment variable is 1, true, on or yes."""
    return os.environ.get(switch, "").strip().lower() in ("1", "true", "on", "yes")


def shown(error: BaseException) -> str:
    """An error in a line of a log: its type, and the beginning of its text."""
    return f"{type(error).__name__}: {str(error):.300}"


def reason_against_build() -> str | None:
    """Why this build cannot serve an engine on any GPU, or None.

    Engines load plugins before they fork workers, so a plugin must not initialize CUDA, as
    `_C.has_cuda()` does.
    """
    if _C.WITH_CUDA:
        return None
    return "this build of moelora has no CUDA kernels (it was made without nvcc: docs/install.md)"


def reason_against_device() -> str | None:
    """Why the kernels of this build do not run on the current GPU, or None.

    The first call in a process runs a tiny layer there and compares it with the CPU's. Before CUDA
    is initialized and in a capture nothing is run, and None returned.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    return _tried_out(torch.cuda.current_device())


@functools.cache
def _tried_out(index: int) -> str | None:
    from moelora.operators.experts import fused_experts_lora

    name = torch.cuda.get_device_name(index)
    try:
        wanted = fused_experts_lora(**_tiny_layer(torch.device("cpu")))
        got = fused_experts_lora(**_tiny_layer(torch.device("cuda", index))).cpu()
    except Exception as error:  # whatever a driver makes of it
        return f"kernels of this build do not run on the {name}: {str(error).splitlines()[0]:.200}"
    if not torch.allclose(got.float(), wanted.float(), rtol=0.05, atol=0.05):
        return f"kernels of this build compute something else on the {name} than on the CPU"
    return None


def _tiny_layer(device: torch.device) -> dict[str, Any]:
    """Arguments of `fused_experts_lora`, always the same. Engines set defaults of dtype, device and
    generators, which are neither used nor changed."""

    def numbers(*shape: int) -> torch.Tensor:
        count = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu")
        values = ((count * 37) % 13 - 6).to(torch.float32) / 24
        return values.view(shape).to(device, torch.bfloat16)

    def table(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return {
        "hidden_states": numbers(3, 64),
        "w13": numbers(2, 128, 64),
        "w2": numbers(2, 64, 64),
        "topk_weights": table([[1.0], [0.5], [1.0]], torch.float32),
        "topk_ids": table([[0], [1], [1]], torch.int32),
        "token_lora_mapping": table([0, -1, 0], torch.int32),
        "w13_lora_a": numbers(1, 2, 8, 64),
        "w13_lora_b": numbers(1, 2, 128, 8),
        "w2_lora_a": numbers(1, 2, 8, 64),
        "w2_lora_b": numbers(1, 2, 64, 8),
        "lora_ranks": table([8], torch.int32),
        "lora_scalings": table([1.0], torch.float32),
        "adapter_enabled": table([True], torch.bool),
    }
