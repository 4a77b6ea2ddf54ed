"""Small problems for every operator and every kernel variant that this machine can run."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import moelora
from moelora import _C, reference

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Relative to the norm of the float64 result: a few roundings of each dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TOKENS, EXPERTS, HIDDEN, INTER, RANK, SLOTS = 24, 4, 192, 128, 8, 3


def _problem(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Keyword arguments of a layer; a third of the tokens has no adapter."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.to(device, dtype)

    weights, ids = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(2)
    mapping = torch.arange(TOKENS, dtype=torch.int32) % (SLOTS + 1) - 1
    return {
        "hidden_states": draw(TOKENS, HIDDEN),
        "w13": draw(EXPERTS, 2 * INTER, HIDDEN),
        "w2": draw(EXPERTS, HIDDEN, INTER),
        "topk_weights": weights.to(device),
        "topk_ids": ids.to(device, torch.int32),
        "token_lora_mapping": mapping.to(device),
        "w13_lora_a": [draw(SLOTS, EXPERTS, RANK, HIDDEN) for _ in range(2)],
        "w13_lora_b": [draw(SLOTS, EXPERTS, INTER, RANK) for _ in range(2)],
        "w2_lora_a": draw(SLOTS, EXPERTS, RANK, INTER),
        "w2_lora_b": draw(SLOTS, EXPERTS, HIDDEN, RANK),
    }


def _layer(dtype: torch.dtype, device: str) -> str:
    """Error message about the layer, "" if its result is correct."""
    problem = _problem(dtype, device)
    want = reference.fused_experts_lora_ref(**problem)
    out = moelora.fused_experts_lora(**problem)
    error = float((out.double().cpu() - want).norm() / want.norm())
    if not error < TOLERANCE[dtype]:
        return f"off by {error:.2g} of the float64 result"
    mapping = problem["token_lora_mapping"]
    without = {name: value for name, value in problem.items() if "lora" not in name}
    base = moelora.fused_experts_lora(**without)
    if not torch.equal(out[mapping < 0], base[mapping < 0]):
        return "tokens without an adapter depend on those with one"
    return ""


def _alignment(device: str) -> str:
    problem = _problem(torch.float32, device)
    ids, mapping = problem["topk_ids"], problem["token_lora_mapping"]
    for mode in ("uniform", "segmented"):
        got = moelora.moe_lora_align_block_size(ids, mapping, EXPERTS, 16, SLOTS, mode=mode)
        want = reference.moe_lora_align_block_size_ref(
            ids.cpu(), mapping.cpu(), EXPERTS, 16, SLOTS, mode=mode
        )
        if got is None or not all(torch.equal(g.cpu(), w) for g, w in zip(got, want, strict=True)):
            return f"{mode}: other rows than the reference's"
    return ""


def count() -> int:
    """Number of checks of `run`."""
    return len(_devices()) + len(_C.usable())


def _devices() -> list[str]:
    return ["cpu", "cuda"] if _C.has_cuda() else ["cpu"]


def run() -> Iterator[tuple[str, str]]:
    """Yields (what, problem or ""). Must not run while operators run on other threads, since it
    forces variants.
    """
    for device in _devices():
        yield f"alignment, {device}", _guard(_alignment, device)
    for variant in _C.usable():
        device = "cuda" if "_sm" in variant else "cpu"
        _C.force_variant(variant)
        try:
            yield variant, _guard(_layer, DTYPES.get(variant.split("_")[1], torch.bfloat16), device)
        finally:
            _C.force_variant(None)


def _guard(check: Callable[..., str], *args: Any) -> str:
    try:
        return check(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
