"""Gradients of problems, by name, and how they are held against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import torch
from cases import Spec, same_bits
from checks import FLOOR_ROUNDINGS, UNIT_ROUNDOFF, assert_close_to_ref, naming
from conftest import PLACES
from torch import Tensor

import moelora
from moelora.reference import (
    fused_experts_lora_backward_ref,
    layer,
    naive_fused_experts_lora_backward,
)
from moelora.reference.backward import TRAINED as TRAINED_OF_LAYER
from moelora.reference.backward import TRAINED_OF_PROJECTION
from moelora.reference.fp8 import numbers_of
from moelora.reference.layer import activate
from moelora.reference.routing import expert_per_choice

FACTORS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")  # of a layer
TRAINED = (*TRAINED_OF_LAYER, *TRAINED_OF_PROJECTION)  # of whichever operator
FENCE = 5e-2  # of the largest gradient

# A gradient goes through the products of the forward and through as many again: for float32, whose
# floor covers other orders of summation, that counts twice.
CHAIN = {torch.float32: FLOOR_ROUNDINGS[torch.float32] * UNIT_ROUNDOFF[torch.float32]}


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
        is_list = isinstance(value, list)
        return [leaf(v) for v in value] if is_list else value.detach().requires_grad_()

    given = {n: leaf(v) for n, v in arguments.items() if n in names and v is not None}
    return arguments | given


def by_autograd(arguments: dict, grad_out: Tensor, names=TRAINED, function=None) -> dict:
    """Gradients as autograd leaves them in `.grad`."""
    given = leaves(arguments, names)
    out = (function or moelora.fused_experts_lora)(**given)
    out.backward(grad_out)
    return leaf_gradients({n: v for n, v in given.items() if n in names})


def leaf_gradients(given: dict) -> dict[str, Tensor]:
    """What autograd left in `.grad` of each leaf."""
    found = {n: v for n, v in given.items() if v is not None}
    found = {n: [t.grad for t in v] if isinstance(v, list) else v.grad for n, v in found.items()}
    return flat(found)


def by_hand(arguments: dict, grad_out: Tensor, **options) -> dict:
    """Gradients of the two operators."""
    _, saved = moelora.fused_experts_lora_saving(**arguments)
    grads = moelora.fused_experts_lora_backward(grad_out, saved, **arguments, **options)
    return flat(grads._asdict())


def assert_bits(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Each gradient that is found has the bits of the one of its name."""
    for name, grad in found.items():
        assert same_bits(grad, want[name]), name


def saved_bytes(function) -> dict[int, int]:
    """Bytes of the storages that autograd keeps, by address."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return storages


# ---- clamps ----
#
# The gradient of a clamp jumps at its limit, and a pre-activation within rounding of the limit may
# lie on either side of it: both are right, and no error bound holds across the jump. So a result is
# held against the reference with the decisions of its own pre-activations.


def _local_rows(arguments: dict) -> list[int]:
    """Flat rows with an expert of this rank, in the order of the experts, as references go."""
    experts = expert_per_choice(
        arguments["topk_ids"], numbers_of(arguments["w13"]).size(0), arguments.get("expert_map")
    )
    flat_experts = [e for row in experts for e in row]
    rows = [p for p, e in enumerate(flat_experts) if e >= 0]
    return sorted(rows, key=lambda p: flat_experts[p])


def _decided(x: Tensor, own: Tensor, low: float | None, high: float) -> Tensor:
    """`x`, moved to the side of each limit that `own` lies on, where it is on the other."""
    outside = own > high if low is None else (own > high) | (own < low)
    beyond = x > high if low is None else (x > high) | (x < low)
    limit = torch.full_like(x, high) if low is None else torch.where(x < 0, low, high)
    x = torch.where(outside & ~beyond, 2 * limit.detach(), x)  # past the limit: no gradient
    return torch.where(beyond & ~outside, limit + (x - x.detach()), x)  # at the limit: all of it


def _inverse_silu(limit: float) -> float:
    """The largest g, to rounding, at which silu(g) is at most `limit`."""
    low, high = 0.0, limit + 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) <= limit else (low, middle)
    return low * (1 - 1e-12)


def reference_gradients(arguments: dict, grad_out: Tensor, gate_up: Tensor | None) -> dict:
    """The reference's, of a clamp with the decisions of pre-activations (P, 2 I)."""
    limit, activation = arguments.get("activation_limit"), arguments.get("activation", "silu")
    if limit is None or gate_up is None or activation == "situ":
        return flat(fused_experts_lora_backward_ref(grad_out, **arguments))
    rows = iter(gate_up.cpu().double()[_local_rows(arguments)])
    gate_limit = _inverse_silu(limit) if activation == "swiglustep" else limit

    def with_decisions(x, activation, alpha, limit):
        own, interleaved = torch.stack([next(rows) for _ in x]), activation == "swigluoai"
        halves = (
            (x[:, 0::2], x[:, 1::2], own[:, 0::2], own[:, 1::2])
            if interleaved
            else (*x.chunk(2, 1), *own.chunk(2, 1))
        )
        gate = _decided(halves[0], halves[2], None, gate_limit)
        up = _decided(halves[1], halves[3], -limit, limit)
        x = torch.stack((gate, up), 2).flatten(1) if interleaved else torch.cat((gate, up), 1)
        return activate(x, activation, alpha, limit)

    with mock.patch.object(layer, "activate", with_decisions):
        return flat(fused_experts_lora_backward_ref(grad_out, **arguments))


def naive_gradients(arguments: dict, grad_out: Tensor) -> tuple[dict, Tensor | None]:
    """Those of the naive layer, and its pre-activations (P, 2 I)."""
    found: list[Tensor] = []

    def recorded(x, *options):
        found.append(x.detach())
        return activate(x, *options)

    with mock.patch.object(layer, "activate", recorded):
        grads = flat(naive_fused_experts_lora_backward(grad_out, **arguments))
    if not found:
        return grads, None
    gate_up = found[0].new_zeros(arguments["topk_ids"].numel(), found[0].size(1))
    gate_up[_local_rows(arguments)] = torch.cat(found)
    return grads, gate_up


# ---- the rule ----


def on_cpu(arguments: dict) -> dict:
    def moved(value):
        if isinstance(value, list):
            return [moved(v) for v in value]
        return value.detach().cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in arguments.items()}


def samples_of(
    grads: dict, arguments: dict, grad_out: Tensor, ref: dict | None = None
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(gradient, reference, reference plus the naive layer's error) of each name. Reference and
    naive layer run on the CPU."""
    clamps = ref is None and arguments.get("activation_limit") is not None
    gate_up = moelora.fused_experts_lora_saving(**arguments)[1].gate_up if clamps else None
    arguments, grad_out = on_cpu(arguments), grad_out.cpu()
    yardstick, its_gate_up = naive_gradients(arguments, grad_out)
    want = its_want = ref
    if clamps:
        want = reference_gradients(arguments, grad_out, gate_up)
        its_want = reference_gradients(arguments, grad_out, its_gate_up)
    elif ref is None:
        want = its_want = reference_gradients(arguments, grad_out, None)
    assert set(grads) == set(want)
    found = {}
    for name, wanted in want.items():
        assert grads[name].shape == wanted.shape, name
        error = yardstick[name].cpu().double() - its_want[name]
        found[name] = (grads[name], wanted, wanted + error)
    return found


def assert_samples(samples: list[dict], dtype) -> dict[str, float]:
    """Fails unless the largest error of each gradient in all samples is what the rule allows, given
    the naive layer's. Returns root mean square errors over those of the naive layer, for
    assert_accurate_on_average()."""
    ratios = {}
    for name in samples[0]:
        triples = zip(*(each[name] for each in samples), strict=True)
        got, want, yardstick = (torch.stack(tensors) for tensors in triples)
        scale = max(1.0, want.abs().max().item() if want.numel() else 0.0)
        options = {"atol": FENCE * scale, "steps": CHAIN.get(dtype, 0.0), "rounded_to": dtype}
        with naming(name):
            assert_close_to_ref(got, want, yardstick, got.dtype, **options)
        # With what rounding the gradient itself costs on both sides: an error may be zero by luck.
        errors = [(t.cpu().double() - want).square().mean().sqrt() for t in (got, yardstick)]
        least = UNIT_ROUNDOFF[dtype] / 2 * want.square().mean().sqrt()
        if want.numel() and least > 0:
            ratios[name] = ((errors[0] + least) / (errors[1] + least)).item()
    return ratios


def assert_gradients(
    grads: dict, arguments: dict, grad_out: Tensor, dtype, ref: dict | None = None
) -> dict[str, float]:
    """Fails unless each gradient is as accurate as that of the naive layer in `dtype`. `ref` are
    gradients in float64, by default the reference's."""
    return assert_samples([samples_of(grads, arguments, grad_out, ref)], dtype)


# What the largest errors of small problems cannot tell apart, an average over problems can. Those
# of float32 are those of an order of summation.
AVERAGE = {torch.float32: 2.0, torch.bfloat16: 1.25, torch.float16: 1.25}


def assert_accurate_on_average(ratios: list[dict[str, float]], dtype) -> dict[str, float]:
    """Fails unless the errors of each gradient are, in the geometric mean over problems, at most
    AVERAGE times those of the naive layer; these means."""
    logs: dict[str, list[float]] = {}
    for each in ratios:
        for name, ratio in each.items():
            logs.setdefault(name.split("[")[0], []).append(math.log(ratio))
    means = {name: math.exp(sum(values) / len(values)) for name, values in logs.items()}
    worse = {name: f"{mean:.2f}" for name, mean in means.items() if mean > AVERAGE[dtype]}
    assert not worse, f"errors over those of the naive layer, on average: {worse}"
    return means


# The largest error of a problem is a sample. Of a few tokens, or a few columns, one draw says
# little about how large it may be, for us or for the naive layer: more draws of such a problem do.
DRAWS = 8


def hold_gradients(spec: Spec, compute=by_autograd, device="cpu") -> dict[str, float]:
    """Fails unless `compute(arguments, grad_out)` is as accurate as the naive layer, in the problem
    of `spec` or, where that is not enough to tell, in DRAWS of its numbers, the first among them.
    Returns what assert_samples() does."""

    def sample(number):
        arguments = replace(spec, seed=spec.seed + 100_000 * number).build().to(device).kwargs()
        shape = arguments["hidden_states"].shape
        grad_out = grad_like(shape, spec.dtype, device, seed=1 + number)
        return samples_of(compute(arguments, grad_out), arguments, grad_out)

    return hold_draws(sample, spec.dtype)


def hold_draws(sample, dtype) -> dict[str, float]:
    """What assert_samples() says of draw 0, or, where that is not enough to tell, of DRAWS."""
    samples = [sample(0)]
    try:
        return assert_samples(samples, dtype)
    except AssertionError:
        samples += [sample(number) for number in range(1, DRAWS)]
        return assert_samples(samples, dtype)


# Of each device one of few bits, and float32.
FEW_PLACES = [PLACES[0], PLACES[1], PLACES[3]]
