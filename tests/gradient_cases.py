"""Gradients of problems, by name, and how they are held against the reference."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES
from checks import assert_close_to_ref
from conftest import CUDA_DTYPES, on_gpu
from torch import Tensor

import moelora
from moelora.reference import fused_experts_lora_backward_ref, naive_fused_experts_lora_backward
from moelora.reference.backward import TRAINED

FENCE = 5e-2  # of the largest gradient


def flat(grads: dict) -> dict[str, Tensor]:
    """One entry per tensor."""
    found = {}
    for name, value in grads.items():
        if isinstance(value, list | tuple):
            found.update({f"{name}[{i}]": t for i, t in enumerate(value)})
        elif value is not None:
            found[name] = value
    return found


def grad_like(out_shape, dtype, device="cpu", seed=1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_shape, generator=generator).to(device, dtype)


def leaves(arguments: dict, names=TRAINED) -> dict:
    """The arguments, those of `names` as leaves of the same memory."""

    def leaf(value):
        return (
            [leaf(v) for v in value] if isinstance(value, list) else value.detach().requires_grad_()
        )

    given = {n: leaf(v) for n, v in arguments.items() if n in names and v is not None}
    return arguments | given


def by_autograd(arguments: dict, grad_out: Tensor, names=TRAINED, function=None) -> dict:
    """Gradients as autograd leaves them in `.grad`."""
    given = leaves(arguments, names)
    out = (function or moelora.fused_experts_lora)(**given)
    out.backward(grad_out)
    return flat(
        {
            n: [t.grad for t in v] if isinstance(v, list) else v.grad
            for n, v in given.items()
            if n in names and v is not None
        }
    )


def by_hand(arguments: dict, grad_out: Tensor, **options) -> dict:
    """Gradients of the two operators."""
    _, saved = moelora.fused_experts_lora_saving(**arguments)
    grads = moelora.fused_experts_lora_backward(grad_out, saved, **arguments, **options)
    return flat(grads._asdict())


def on_cpu(arguments: dict) -> dict:
    def moved(value):
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}


def assert_gradients(
    grads: dict, arguments: dict, grad_out: Tensor, dtype, ref: dict | None = None
) -> dict[str, float]:
    """Fails unless each gradient is as accurate as that of the naive layer in `dtype`; the errors
    over what the rule allows. `ref` are gradients in float64, by default the reference's. Both run
    on the CPU."""
    arguments, grad_out = on_cpu(arguments), grad_out.cpu()
    ref = ref or flat(fused_experts_lora_backward_ref(grad_out, **arguments))
    naive = flat(naive_fused_experts_lora_backward(grad_out, **arguments))
    assert set(grads) == set(ref)
    # A value that rounds to the other side of a clamp loses all of its gradient: no fence holds.
    fenced = arguments.get("activation_limit") is None
    errors = {}
    for name, want in ref.items():
        got = grads[name]
        assert got.shape == want.shape, name
        scale = max(1.0, want.abs().max().item() if want.numel() else 0.0)
        fence = FENCE * scale if fenced else float("inf")
        try:
            errors[name] = assert_close_to_ref(
                got, want, naive[name], got.dtype, atol=fence, rounded_to=dtype
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    return errors


DEVICES = ["cpu", on_gpu("cuda")]
PLACES = [
    *(pytest.param(("cpu", d), id=f"cpu-{str(d)[6:]}") for d in DTYPES),
    *(on_gpu(("cuda", d), id=f"cuda-{str(d)[6:]}") for d in CUDA_DTYPES),
]
# Of each device one of few bits, and float32.
FEW_PLACES = [PLACES[0], PLACES[1], PLACES[3]]
