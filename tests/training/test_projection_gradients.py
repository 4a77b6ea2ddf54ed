"""Gradients of a projection and of the deltas of adapters alone, against float64."""

from dataclasses import replace

import pytest
import torch
from cases import DTYPES, EDGE_CASES, Spec, random_specs, same_bits
from gradient_cases import (
    assert_accurate_on_average,
    assert_samples,
    flat,
    grad_like,
)

import moelora
from moelora.reference import fused_moe_lora_gemm_backward_ref, naive_fused_moe_lora_gemm_backward
from moelora.reference.backward import TRAINED_OF_PROJECTION

DELTAS = {"w13": moelora.moe_lora_gate_up_delta, "w2": moelora.moe_lora_down_delta}
FACTORS = ("lora_a", "lora_b")
TWO_BYTES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)


def with_leaves(arguments):
    def leaf(value):
        if isinstance(value, list):
            return [leaf(v) for v in value]
        return value.detach().requires_grad_()

    given = {n: leaf(arguments[n]) for n in TRAINED_OF_PROJECTION if arguments.get(n) is not None}
    return arguments | given


def grads_of(arguments, given):
    def grad(value):
        return [t.grad for t in value] if isinstance(value, list) else value.grad

    return flat({n: grad(given[n]) for n in TRAINED_OF_PROJECTION if arguments.get(n) is not None})


def of_projection(arguments, grad_out):
    given = with_leaves(arguments)
    moelora.fused_moe_lora_gemm(**given).backward(grad_out)
    return grads_of(arguments, given)


def for_delta(projection, arguments):
    """The arguments of a delta, and the projection without weights that it is."""
    num_experts = arguments["w"].size(0)
    own = {n: v for n, v in arguments.items() if n not in ("w", "bias")}
    own["x"] = arguments["x"]
    reference = arguments | {"w": torch.zeros_like(arguments["w"]), "bias": None}
    return own | {"num_experts": num_experts}, reference


def samples(grads, reference, grad_out):
    want = flat(fused_moe_lora_gemm_backward_ref(grad_out, **reference))
    naive = flat(naive_fused_moe_lora_gemm_backward(grad_out, **reference))
    assert set(grads) == set(want)
    return {n: (grads[n], want[n], naive[n].double()) for n in want}


def hold(spec, projection, mul, compute, deltas=False):
    """One problem, or where its errors say too little eight of its kind."""

    def sample(number):
        p = replace(spec, seed=spec.seed + 100_000 * number).build()
        arguments = p.gemm_kwargs(projection, mul)
        out = (*p.topk_ids.shape, arguments["w"].size(1))
        grad_out = grad_like(out, spec.dtype, seed=1 + number)
        if deltas:
            own, arguments = for_delta(projection, arguments)
            return samples(compute(own, grad_out), arguments, grad_out)
        return samples(compute(arguments, grad_out), arguments, grad_out)

    found = [sample(0)]
    try:
        return assert_samples(found, spec.dtype)
    except AssertionError:
        return assert_samples([*found, *(sample(i) for i in range(1, 8))], spec.dtype)


@pytest.mark.parametrize("mul", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("projection", ["w13", "w2"])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, projection, mul):
    spec = replace(EDGE_CASES[name], dtype=torch.bfloat16)
    hold(spec, projection, mul, of_projection)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_random_problems(dtype):
    ratios = []
    for number, spec in enumerate(random_specs(24, first_seed=900, dtypes=(dtype,))):
        projection, mul = ("w13", "w2")[number % 2], number % 4 < 2
        try:
            ratios.append(hold(spec, projection, mul, of_projection))
        except Exception as error:
            raise AssertionError(f"{spec} {projection} {mul}: {error}") from error
    assert_accurate_on_average(ratios, dtype)


# ---- deltas ----


def of_delta(projection, base=None, add_inputs=True):
    def compute(arguments, grad_out):
        given = with_leaves(arguments)
        out = None if base is None else base(grad_out)
        result = DELTAS[projection](**given, out=out, add_inputs=add_inputs)
        result.backward(grad_out)
        return grads_of(arguments, given)

    return compute


@pytest.mark.parametrize("mul", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("projection", DELTAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_deltas(dtype, projection, mul):
    ratios = []
    for spec in (
        Spec(tokens=9, dtype=dtype),
        Spec(tokens=12, dtype=dtype, sharing="outer", ranks=(8, 5), spare_rank=3, slices=1),
        Spec(tokens=7, dtype=dtype, mix="disabled", routing="out_of_range", remote=2),
        Spec(tokens=5, dtype=dtype, mix="all_different", pass_ranks=False, scalings=False),
    ):
        ratios.append(hold(spec, projection, mul, of_delta(projection), deltas=True))
    assert_accurate_on_average(ratios, dtype)


@pytest.mark.parametrize("projection", DELTAS)
def test_delta_of_a_base_product(projection):
    """In place, to a tensor in a graph: its gradient goes on, unless it is replaced."""
    p = Spec(tokens=6, dtype=torch.bfloat16).build()
    arguments, _ = for_delta(projection, p.gemm_kwargs(projection))
    columns = p.w13.size(1) if projection == "w13" else p.w2.size(1)
    grad_out = grad_like((*p.topk_ids.shape, columns), torch.bfloat16)
    alone = of_delta(projection)(arguments, grad_out)
    for add_inputs in (True, False):
        leaf = torch.ones(grad_out.shape, dtype=torch.bfloat16, requires_grad=True)
        base = leaf * 1
        given = with_leaves(arguments)
        result = DELTAS[projection](**given, out=base, add_inputs=add_inputs)
        assert result is base and base.requires_grad
        with torch.no_grad():
            want = DELTAS[projection](**arguments, out=torch.ones_like(leaf), add_inputs=add_inputs)
        assert same_bits(base.detach(), want)
        base.backward(grad_out)
        for name, grad in grads_of(arguments, given).items():
            assert same_bits(grad, alone[name]), name
        assert same_bits(leaf.grad, grad_out) if add_inputs else leaf.grad is None


def test_a_leaf_is_not_written_to():
    p = Spec(tokens=6).build()
    arguments, _ = for_delta("w2", p.gemm_kwargs("w2"))
    out = torch.zeros(*p.topk_ids.shape, p.w2.size(1), requires_grad=True)
    with pytest.raises(RuntimeError, match="out requires a gradient, and it is a leaf"):
        moelora.moe_lora_down_delta(**with_leaves(arguments), out=out)


# ---- promises ----


def test_an_adapter_alone():
    """Its gradients have the bits that they have without the other adapters of the batch."""
    p = Spec(tokens=40, ranks=(8, 16, 3), dtype=torch.bfloat16).build()
    arguments = p.gemm_kwargs("w13", True)
    grad_out = grad_like((*p.topk_ids.shape, p.w13.size(1)), torch.bfloat16)
    together = of_projection(arguments, grad_out)
    mapping = arguments["token_lora_mapping"]
    alone = of_projection(
        arguments | {"token_lora_mapping": mapping.masked_fill(mapping != 1, -1)}, grad_out
    )
    for name in together:
        if name.startswith("lora"):
            assert same_bits(together[name][1], alone[name][1]), name
            assert not alone[name][0].any()
    base = of_projection(
        {k: v for k, v in arguments.items() if "lora" not in k and "adapter" not in k}, grad_out
    )
    rows = mapping < 0
    assert rows.any() and same_bits(together["x"][rows], base["x"][rows])


def test_other_forms_of_weights():
    p = Spec(tokens=9, hidden=128, inter=64, dtype=torch.bfloat16).build()
    arguments = p.gemm_kwargs("w13", True)
    grad_out = grad_like((*p.topk_ids.shape, p.w13.size(1)), torch.bfloat16)
    packed = arguments | {"w": moelora.prepack_weights(p.w13)}
    want = of_projection(arguments, grad_out)
    for name, grad in of_projection(packed, grad_out).items():
        assert same_bits(grad, want[name]), name


def test_no_tokens():
    """The gradient of out.sum() is expanded: contiguous for torch, in any strides."""
    arguments = Spec(tokens=0, bias=True).build().gemm_kwargs("w13")
    x = arguments["x"].detach().requires_grad_()
    bias = arguments["bias"].detach().requires_grad_()
    moelora.fused_moe_lora_gemm(**arguments | {"x": x, "bias": bias}).sum().backward()
    assert x.grad.shape == x.shape and not bias.grad.any()


def test_what_is_refused():
    p = Spec(tokens=6, bias=True).build()
    arguments = p.gemm_kwargs("w13")
    for name, value in (("w", p.w13), ("lora_scalings", p.lora_scalings)):
        given = arguments | {name: value.detach().requires_grad_()}
        with pytest.raises(RuntimeError, match=rf"{name} requires a gradient, and"):
            moelora.fused_moe_lora_gemm(**given)
    x = p.hidden_states.detach().requires_grad_()
    out = torch.empty(*p.topk_ids.shape, p.w13.size(1))
    with pytest.raises(RuntimeError, match="no backward of a call with out="):
        moelora.fused_moe_lora_gemm(**arguments | {"x": x}, out=out)
    result = moelora.fused_moe_lora_gemm(**arguments | {"x": x}).square().sum()
    with pytest.raises(RuntimeError, match="a backward has none of its own"):
        torch.autograd.grad(result, x, create_graph=True)


def test_what_is_written_to_is_noticed():
    p = Spec(tokens=6).build()
    given = with_leaves(p.gemm_kwargs("w13"))
    out = moelora.fused_moe_lora_gemm(**given)
    with torch.no_grad():
        given["x"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@TWO_BYTES
def test_compiled(dtype):
    p = Spec(tokens=6, dtype=dtype).build()
    arguments = p.gemm_kwargs("w13", True)
    grad_out = grad_like((*p.topk_ids.shape, p.w13.size(1)), dtype)
    want = of_projection(arguments, grad_out)
    given = with_leaves(arguments)
    torch.compile(moelora.fused_moe_lora_gemm, backend="aot_eager", fullgraph=True)(
        **given
    ).backward(grad_out)
    for name, grad in grads_of(arguments, given).items():
        assert same_bits(grad, want[name]), name
