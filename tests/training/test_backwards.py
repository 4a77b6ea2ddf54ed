"""The backward of a layer, of a projection and of deltas by hand: dtypes of factors and of
gradients, given buffers, sparse gradients."""

from dataclasses import replace

import pytest
import torch
from backward_cases import (
    DELTA_OPERATORS,
    FACTORS,
    KINDS,
    LAYER,
    OPERATORS,
    PROJECTIONS,
    SPARSE_SPECS,
    WITHOUT_LAYER,
    converted,
    each,
    with_factors,
)
from cases import Spec, same_bits
from checks import guarded_empty
from conftest import PLACES, on_gpu
from gradient_cases import (
    FEW_PLACES,
    assert_bits,
    assert_gradients,
    assert_samples,
    by_autograd,
    flat,
    grad_like,
)
from quantized_cases import ALL_FORMATS, NATIVE, made
from streams import Captured, no_waits

import moelora
from moelora import ProjectionGradients
from moelora.operators.call import factor_list
from moelora.training import touched_pairs

SIXTEEN_BITS = PLACES[1:]
SPEC = Spec(tokens=9, ranks=(8, 5), spare_rank=3, bias=True)
DOWN, DOWN_DELTA = PROJECTIONS[1], DELTA_OPERATORS[1]


def is_summed(name):
    """Over tokens, in float32: gradients of factors and biases."""
    return "lora" in name or "bias" in name


# ---- by hand as by autograd ----


@each(OPERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_bits_of_autograd(place, operator):
    for spec in (SPEC, replace(SPEC, sharing="outer", slices=1), replace(SPEC, tokens=0)):
        arguments, grad_out = operator.problem(spec, place)
        want = operator.by_autograd(arguments, grad_out)
        found = operator.by_hand(arguments, grad_out)
        assert set(found) == set(want)
        for name, grad in found.items():
            assert same_bits(grad, want[name]), name
            assert spec.tokens or not grad.any(), f"{name}: zeros, whatever was in memory"


@each(KINDS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_rows_of_grad_out_in_any_strides(place, operator):
    arguments, grad_out = operator.problem(SPEC, place)
    spread = torch.full((*grad_out.shape[:-2], grad_out.size(-2) + 1, grad_out.size(-1) + 8), 1e9)
    spread = spread.to(grad_out)[..., :-1, :-8].copy_(grad_out)
    want = operator.by_hand(arguments, grad_out)
    assert_bits(operator.by_hand(arguments, spread), want)


@pytest.mark.parametrize("place", FEW_PLACES)
def test_rows_of_a_down_delta_in_three_dimensions(place):
    """As the forward takes them; so does the buffer of their gradient."""
    arguments, grad_out = DOWN_DELTA.problem(SPEC, place)
    want = DOWN_DELTA.by_hand(arguments, grad_out)["x"]
    cube = arguments["x"].view(*arguments["topk_ids"].shape, -1)
    found = DOWN_DELTA.by_hand(arguments | {"x": cube}, grad_out)["x"]
    assert found.shape == cube.shape and same_bits(found.flatten(0, 1), want)
    to = torch.empty_like(cube)
    DOWN_DELTA.backward(arguments | {"x": cube}, grad_out, grads=ProjectionGradients(x=to))
    assert same_bits(to, found)
    spread = torch.empty(cube.size(0), cube.size(1) + 1, cube.size(2)).to(cube)[:, :-1]
    with pytest.raises(ValueError, match=r"grads.x has strides .*, expected equally spaced rows"):
        DOWN_DELTA.backward(arguments | {"x": cube}, grad_out, grads=ProjectionGradients(x=spread))


@pytest.mark.parametrize("place", FEW_PLACES)
def test_an_unknown_number_of_experts(place):
    """Factors that all experts share, in a delta that is not told how many there are."""
    spec = replace(SPEC, sharing="expanded", bias=False)
    arguments, grad_out = DOWN_DELTA.problem(spec, place)
    arguments |= {name: arguments[name][:, :1].contiguous() for name in FACTORS}
    arguments["num_experts"] = None
    want = DOWN_DELTA.by_autograd(arguments, grad_out)
    assert_bits(DOWN_DELTA.by_hand(arguments, grad_out), want)


# ---- dtypes of factors and of gradients ----


@each(OPERATORS)
@pytest.mark.parametrize("place", SIXTEEN_BITS)
@pytest.mark.parametrize("sharing", ["per_expert", "outer", "expanded"])
def test_float32_factors(sharing, place, operator):
    """Beside 16 bits: rounded on their way in, with gradients in float32."""
    arguments, grad_out = operator.problem(replace(SPEC, sharing=sharing), place)
    wide = with_factors(arguments, torch.Tensor.float)
    assert same_bits(operator(**wide), operator(**arguments))
    narrow = operator.by_hand(arguments, grad_out)
    exact = operator.by_hand(arguments, grad_out, float32=True)
    grads = operator.by_autograd(wide, grad_out)
    by_operator = operator.by_hand(wide, grad_out)
    for name, grad in grads.items():
        factor, routing = "lora" in name, operator is LAYER and name == "topk_weights"
        assert grad.dtype == (torch.float32 if factor else narrow[name].dtype), name
        assert same_bits(grad, by_operator[name]), name
        assert routing or same_bits(grad.to(narrow[name].dtype), narrow[name]), name
        assert not factor or same_bits(grad, exact[name]), name


@each(OPERATORS)
@pytest.mark.parametrize("place", SIXTEEN_BITS)
def test_float32_factors_between_the_numbers_of_16_bits(place, operator):
    """Accurate as those of the layer in torch that rounds them."""
    arguments, grad_out = operator.problem(replace(SPEC, tokens=40), place)
    between = with_factors(arguments, lambda t: t.float() * (1 + 2.0**-9))
    rounded = with_factors(between, lambda t: t.to(place[1]))
    assert same_bits(*(operator(**each) for each in (between, rounded)))
    found, want = (operator.by_hand(each, grad_out, float32=True) for each in (between, rounded))
    assert_bits(want, found)
    grads = operator.by_autograd(between, grad_out)
    if operator is LAYER:
        assert_gradients(grads, between, grad_out, place[1])
    if operator.kind == "projection":
        assert_samples([operator.samples(grads, between, grad_out)], place[1])


@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]])
@pytest.mark.parametrize("form", [*ALL_FORMATS, "packed"])
def test_float32_factors_beside_weights_of_every_form(form, place):
    device, dtype = place
    spec = Spec(tokens=9, hidden=128, inter=128, ranks=(8, 5))
    p = made(spec, NATIVE if form == "packed" else form, dtype).to(device)
    arguments = plain = p.gemm_kwargs("w2", True)
    if form == "packed":
        arguments = plain | {"w": moelora.prepack_weights(plain["w"])}
    grad_out = grad_like((*arguments["topk_ids"].shape, spec.hidden), dtype, device)
    wide = with_factors(arguments, torch.Tensor.float)
    assert same_bits(DOWN(**wide), DOWN(**arguments))
    want = DOWN.by_hand(plain, grad_out, float32=True)
    assert_bits(DOWN.by_autograd(wide, grad_out), want)


@each(WITHOUT_LAYER)
@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]])
def test_strides_of_float32_factors(place, operator):
    """Also those that no 16-byte access reads."""
    arguments, grad_out = operator.problem(SPEC, place)
    want = operator.by_hand(arguments, grad_out, float32=True)

    def apart(t):
        wide = torch.full((*t.shape[:-1], t.size(-1) + 3), float("nan")).to(t.device)
        wide[..., 1:-2] = t.float()
        return wide[..., 1:-2]

    found = operator.by_hand(with_factors(arguments, apart), grad_out, float32=True)
    assert_bits(want, found)


@each(KINDS)
def test_factors_have_one_dtype(operator):
    arguments, grad_out = operator.problem(SPEC, ("cpu", torch.bfloat16))
    name = operator.factors[-2]
    mixed = arguments | {name: arguments[name].float()}
    for call in (lambda: operator(**mixed), lambda: operator.by_hand(mixed, grad_out)):
        with pytest.raises(ValueError, match=r"lora_b.* has dtype bfloat16, expected float32 as"):
            call()
    with pytest.raises(ValueError, match=r"lora_a.* has dtype float16, expected bfloat16"):
        operator(**with_factors(arguments, torch.Tensor.half))


# ---- into given memory ----


def buffers(arguments, operator, device, dtype=None, fill=0.0):
    """Gradients to write to, each in guard bands of its own."""
    guarded = {}

    def new(name, value):
        if isinstance(value, list):
            return [new(f"{name}[{i}]", v) for i, v in enumerate(value)]
        own = dtype if dtype and is_summed(name) else value.dtype
        guarded[name] = guarded_empty(value.shape, own, device)
        return guarded[name].tensor.fill_(fill)

    names = [n for n in operator.gradients._fields if arguments.get(n) is not None]
    return operator.gradients(**{n: new(n, arguments[n]) for n in names}), guarded


@each(OPERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_written(place, operator):
    """What was there before does not matter, and nothing beside it is written."""
    for spec in (SPEC, replace(SPEC, sharing="outer", routing="few"), replace(SPEC, tokens=0)):
        arguments, grad_out = operator.problem(spec, place)
        want = operator.by_hand(arguments, grad_out)
        grads, guarded = buffers(arguments, operator, place[0], fill=float("nan"))
        assert operator.backward(arguments, grad_out, grads=grads) is grads
        for name, memory in guarded.items():
            memory.check(name)
            assert same_bits(memory.tensor, want[name]), name


@each(OPERATORS)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("wide", [False, True], ids=["factors16", "factors32"])
@pytest.mark.parametrize("place", PLACES)
def test_accumulated(place, wide, dtype, operator):
    """To what is there, rounded once; the gradients of x and of routing weights are written."""
    arguments, grad_out = operator.problem(replace(SPEC, routing="few"), place)
    alone = operator.by_hand(arguments, grad_out, float32=True)
    if wide:
        arguments = with_factors(arguments, torch.Tensor.float)
    grads, guarded = buffers(arguments, operator, place[0], dtype, fill=0.5)
    operator.backward(arguments, grad_out, grads=grads, accumulate=True)
    for name, memory in guarded.items():
        memory.check(name)
        want = alone[name] + 0.5 if is_summed(name) else alone[name]
        want = want.to(memory.tensor.dtype)
        assert same_bits(memory.tensor, want), name


@each(KINDS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_buffers_of_any_strides(place, operator):
    arguments, grad_out = operator.problem(SPEC, place)
    want = operator.by_hand(arguments, grad_out)
    name = operator.factors[-2]
    loras, experts, rank, inter = arguments[name].shape
    memory = torch.full((experts, loras, rank, inter + 5), 7.0, dtype=place[1], device=place[0])
    to = memory.transpose(0, 1)[..., 2 : 2 + inter]
    operator.backward(arguments, grad_out, grads=operator.gradients(**{name: to}))
    assert same_bits(to, want[name])
    to.fill_(7.0)
    assert (memory == 7.0).all()


@each(OPERATORS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_wanted(place, operator):
    """Each gradient has the bits that it has among all, whichever others are computed."""
    on_input = replace(SPEC, top_k=1, weight_on_input=True)
    for spec in (SPEC, on_input) if operator is LAYER else (SPEC,):
        arguments, grad_out = operator.problem(spec, place)
        every = operator.by_hand(arguments, grad_out)
        fields = operator.gradients._fields
        for names in (*((n,) for n in fields), operator.factors, fields[:2], ()):
            found = operator.by_hand(arguments, grad_out, wanted=names)
            present = [n for n in every if n.split("[")[0] in names]
            assert sorted(found) == sorted(present)
            assert all(same_bits(found[n], every[n]) for n in present), names


# ---- sparse ----

NOTHING = 7.0  # what is not written


def sparse_setting(name, place, operator):
    arguments, grad_out = operator.problem(SPARSE_SPECS[name], place)
    b = factor_list(arguments[operator.factors[-1]])[0]
    weights = arguments.get("w13" if operator is LAYER else "w")
    pairs, count = touched_pairs(
        arguments["topk_ids"],
        arguments["token_lora_mapping"],
        b.size(0),
        arguments["num_experts"] if weights is None else weights.size(0),
        arguments.get("expert_map"),
    )
    assert count == (pairs >= 0).sum() == pairs.max() + 1
    return arguments, grad_out, pairs, int(count)


def sparse_buffers(operator, arguments, pairs, count, dtype=None):
    """Gradients to write to, of the pairs alone where experts have factors of their own."""

    def buffer(factor):
        sparse = factor.size(1) == pairs.size(1)
        shape = (count, *factor.shape[2:]) if sparse else factor.shape
        return torch.full(shape, NOTHING, dtype=dtype or factor.dtype, device=factor.device)

    buffers = {n: converted(arguments[n], buffer) for n in operator.factors}
    return operator.gradients(**buffers)


def factors_of(operator, *gradients):
    """(name, its tensor in each of some gradients) of every factor's tensors."""
    for name in operator.factors:
        for tensors in zip(*(factor_list(getattr(g, name)) for g in gradients), strict=True):
            yield name, *tensors


@each(OPERATORS)
@pytest.mark.parametrize("name", SPARSE_SPECS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_touched_pairs_have_the_bits_of_dense_gradients(place, name, operator):
    arguments, grad_out, pairs, count = sparse_setting(name, place, operator)
    for given in (arguments, with_factors(arguments, torch.Tensor.float)):
        dense = operator.backward(given, grad_out, wanted=operator.factors)
        to = sparse_buffers(operator, given, pairs, count + 1)
        found = operator.backward(given, grad_out, grads=to, pairs=pairs)
        touched = pairs >= 0
        for factor, got, want in factors_of(operator, found, dense):
            if want.size(1) == pairs.size(1):
                assert same_bits(got[:count], want[touched]), factor
                assert not want[~touched].any(), f"{factor}: a pair is missing"
                assert (got[count:] == NOTHING).all(), f"{factor}: written without a pair"
            else:
                assert same_bits(got, want), factor


@each(OPERATORS)
@pytest.mark.parametrize("name", ["per_expert", "long"])
@pytest.mark.parametrize("place", FEW_PLACES)
def test_sparse_gradients_accumulate(place, name, operator):
    arguments, grad_out, pairs, count = sparse_setting(name, place, operator)
    to = sparse_buffers(operator, arguments, pairs, count, torch.float32)
    operator.backward(arguments, grad_out, grads=to, pairs=pairs)
    once = [(name, grad.clone()) for name, grad in factors_of(operator, to)]
    operator.backward(arguments, grad_out, grads=to, pairs=pairs, accumulate=True)
    for (factor, first), (_, both) in zip(once, factors_of(operator, to), strict=True):
        assert torch.equal(both, 2 * first), factor


@pytest.mark.parametrize("place", FEW_PLACES)
def test_any_order_and_any_part_of_the_pairs(place):
    arguments, grad_out, pairs, count = sparse_setting("per_expert", place, LAYER)
    dense = LAYER.backward(arguments, grad_out, wanted=LAYER.factors)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(pairs)
    untouched = (pairs < 0).nonzero()[0].tolist()
    some = torch.where(pairs >= 0, order[pairs.long()], -1).int()
    some[some == 1] = 1000  # out of range: not wanted
    some[tuple(untouched)] = 1
    to = sparse_buffers(LAYER, arguments, pairs, count)
    found = LAYER.backward(arguments, grad_out, grads=to, pairs=some)
    for _, got, want in factors_of(LAYER, found, dense):
        for l, e in (pairs >= 0).nonzero().tolist():
            if some[l, e] < count:
                assert same_bits(got[some[l, e]], want[l, e])
        assert not got[1].any(), "a pair without tokens has zeros"


# ---- under torch.compile, in a CUDA graph ----


@each([PROJECTIONS[0], DELTA_OPERATORS[0]])
@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]])
def test_compiled(place, operator):
    arguments, grad_out = operator.problem(SPEC, place)
    wide = with_factors(arguments, torch.Tensor.float)
    want = operator.by_hand(wide, grad_out)
    call = torch.compile(lambda given: operator(**given), backend="aot_eager", fullgraph=True)
    found = by_autograd(wide, grad_out, function=lambda **given: call(given))
    assert_bits(found, want)


@each(WITHOUT_LAYER)
@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_a_captured_step_reads_the_factors_of_its_replay(place, operator):
    """Float32 ones are rounded in the graph, which accumulates and waits for the GPU nowhere."""
    arguments, grad_out = operator.problem(replace(SPEC, tokens=60), (place, torch.bfloat16))
    wide = with_factors(arguments, torch.Tensor.float)
    grads, _ = buffers(wide, operator, place, torch.float32)

    def step():
        out = operator(**wide)
        operator.backward(wide, grad_out, grads=grads, accumulate=True)
        return out

    captured = Captured(step)
    with no_waits():
        step()
    for name in FACTORS:
        for factor in factor_list(wide[name]):
            factor.mul_(1.5)
    for grad in flat(grads._asdict()).values():
        grad.fill_(0.5)
    assert same_bits(captured.replay(), operator(**wide))
    want, _ = buffers(wide, operator, place, torch.float32, fill=0.5)
    operator.backward(wide, grad_out, grads=want, accumulate=True)
    for name, grad in flat(grads._asdict()).items():
        assert same_bits(grad, flat(want._asdict())[name]), name
