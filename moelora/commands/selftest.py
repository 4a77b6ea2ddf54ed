"""Small layers of all kinds of weights, for every kernel variant that this machine can run."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

import moelora
from moelora import _C, reference
from moelora.weights.rounding import ROUNDINGS

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Relative to the norm of the float64 result: a few roundings of each dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TOLERANCE_OF_FP8 = 3e-2  # x and h of a kernel may round to the neighbour of the reference's
EXPERTS, HIDDEN, INTER, RANK, SLOTS = 4, 384, 128, 8, 3
TOKENS = (24, 2)  # a few have kernels of their own
# Of weights: as they are, and each format that a kernel multiplies, FP8 also with x in FP8.
FORMS = ("", *ROUNDINGS, "fp8 x")


@cache
def _problem(dtype: torch.dtype, device: str, tokens: int, form: str) -> dict[str, Any]:
    """Keyword arguments of a layer; some of the tokens have no adapter.

    `form`: "", weights in `dtype`; or a format of `QuantizedWeights.from_dense`, with " x" if
    activations are quantized, too.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def packed(w: torch.Tensor, **options: Any) -> Any:
        if not form:
            return w
        name: Any = form.removesuffix(" x")
        options["activations"] = "native" if name == form else "fp8"
        return moelora.QuantizedWeights.from_dense(w, name, dtype=dtype, **options)

    weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(2)
    mapping = torch.arange(tokens, dtype=torch.int32) % (SLOTS + 1) - 1
    problem: dict[str, Any] = {
        "hidden_states": draw(tokens, HIDDEN),
        "w13": packed(draw(EXPERTS, 2 * INTER, HIDDEN), gate_up="concatenated"),
        "w2": packed(draw(EXPERTS, HIDDEN, INTER)),
        "topk_weights": weights,
        "topk_ids": ids.to(torch.int32),
        "token_lora_mapping": mapping,
        "w13_lora_a": [draw(SLOTS, EXPERTS, RANK, HIDDEN) for _ in range(2)],
        "w13_lora_b": [draw(SLOTS, EXPERTS, INTER, RANK) for _ in range(2)],
        "w2_lora_a": draw(SLOTS, EXPERTS, RANK, INTER),
        "w2_lora_b": draw(SLOTS, EXPERTS, HIDDEN, RANK),
    }
    return {
        name: [t.to(device) for t in value] if isinstance(value, list) else value.to(device)
        for name, value in problem.items()
    }


@cache
def _reference(dtype: torch.dtype, tokens: int, form: str) -> torch.Tensor:
    return reference.fused_experts_lora_ref(**_problem(dtype, "cpu", tokens, form))


def _layers(variant: str) -> Iterator[tuple[torch.dtype, str, int, str]]:
    """Arguments of `_problem` for the layers that a variant may be a kernel of."""
    dtype = DTYPES.get(variant.split("_")[1], torch.bfloat16)
    device = "cuda" if "_sm" in variant else "cpu"
    for form in FORMS if dtype != torch.float32 else FORMS[:1]:
        for tokens in TOKENS:
            yield dtype, device, tokens, form


def _variant(name: str) -> str | None:
    """Error message about a layer that a forced variant is a kernel of, "" if all of them are
    correct; None if it is a kernel of none."""
    verdict = None
    for layer in _layers(name):
        out = moelora.fused_experts_lora(**_problem(*layer))
        if name in _C.last_plan().replace("=", " ").split():
            if verdict := _compared(out, *layer):
                return f"{layer[-1] or 'weights as they are'}, {layer[-2]} tokens: {verdict}"
    return verdict


def _compared(out: torch.Tensor, dtype: torch.dtype, device: str, tokens: int, form: str) -> str:
    problem, want = _problem(dtype, device, tokens, form), _reference(dtype, tokens, form)
    error = float((out.double().cpu() - want).norm() / want.norm())
    if not error < (TOLERANCE_OF_FP8 if form.endswith(" x") else TOLERANCE[dtype]):
        return f"off by {error:.2g} of the float64 result"
    mapping = problem["token_lora_mapping"]
    without = {name: value for name, value in problem.items() if "lora" not in name}
    base = moelora.fused_experts_lora(**without)
    if not torch.equal(out[mapping < 0], base[mapping < 0]):
        return "tokens without an adapter depend on those with one"
    return ""


def _alignment(device: str) -> str:
    problem = _problem(torch.float32, device, TOKENS[0], FORMS[0])
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


def run() -> Iterator[tuple[str, str | None]]:
    """Yields (what, problem); "": it is correct, None: it was not run. Must not run while operators
    run on other threads, since it forces variants.
    """
    for device in _devices():
        yield f"alignment, {device}", _guard(_alignment, device)
    for variant in _C.usable():
        _C.force_variant(variant)
        try:
            yield variant, _guard(_variant, variant)
        finally:
            _C.force_variant(None)


def _guard(check: Callable[..., str | None], *args: Any) -> str | None:
    try:
        return check(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
