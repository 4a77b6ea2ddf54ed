"""The backward of a layer, of a projection and of deltas by hand: dtypes of factors and of
gradients, given buffers, sparse gradients."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from checks import guarded_empty
from conftest import PLACES, on_gpu
from delta_cases import DELTAS
from gradient_cases import FACTORS as FACTORS_OF_LAYER
from gradient_cases import FEW_PLACES, assert_gradients, assert_samples, flat, grad_like
from gradient_cases import by_autograd as of_layer
from projection_cases import FACTORS, for_delta, grads_of, of_projection, samples, with_leaves
from quantized_cases import ALL_FORMATS, NATIVE, made
from streams import Captured, no_waits

import moelora
from moelora import ProjectionGradients
from moelora.operators.call import factor_list
from moelora.training import touched_pairs

KINDS = ("projection", "delta")
SIXTEEN_BITS = PLACES[1:]
EACH_PROJECTION = pytest.mark.parametrize("projection", DELTAS)
EACH_KIND = pytest.mark.parametrize("kind", ("layer", *KINDS))
EACH_OPERATOR = pytest.mark.parametrize(
    ("kind", "projection"), [("layer", None), *itertools.product(KINDS, DELTAS)]
)
SPEC = Spec(tokens=9, ranks=(8, 5), spare_rank=3, bias=True)


def arguments_of(spec, place, projection="w13", kind="projection"):
    """(arguments of the operator, gradient of its result)."""
    device, dtype = place
    p = replace(spec, dtype=dtype).build().to(device)
    if kind == "layer":
        return p.kwargs(), grad_like(p.hidden_states.shape, dtype, device)
    arguments = p.gemm_kwargs(projection, True)
    grad_out = grad_like((*p.topk_ids.shape, arguments["w"].size(1)), dtype, device)
    return (for_delta(projection, arguments)[0] if kind == "delta" else arguments), grad_out


def forward(projection, kind, arguments):
    if kind == "layer":
        return moelora.fused_experts_lora(**arguments)
    return (DELTAS[projection] if kind == "delta" else moelora.fused_moe_lora_gemm)(**arguments)


def backward(kind, arguments, grad_out, **options):
    if kind == "layer":
        _, saved = moelora.fused_experts_lora_saving(**arguments)
        return moelora.fused_experts_lora_backward(grad_out, saved, **arguments, **options)
    function = (
        moelora.moe_lora_delta_backward if kind == "delta" else moelora.fused_moe_lora_gemm_backward
    )
    return function(grad_out, **arguments, **options)


def by_hand(kind, arguments, grad_out, **options):
    return flat(backward(kind, arguments, grad_out, **options)._asdict())


def by_autograd(projection, kind, arguments, grad_out):
    if kind == "layer":
        return of_layer(arguments, grad_out)
    given = with_leaves(arguments)
    forward(projection, kind, given).backward(grad_out)
    return grads_of(arguments, given)


def gradients_of(kind):
    return moelora.Gradients if kind == "layer" else ProjectionGradients


def factors_of(kind):
    return FACTORS_OF_LAYER if kind == "layer" else FACTORS


def is_summed(name):
    """Over tokens, in float32: gradients of factors and biases."""
    return "lora" in name or "bias" in name


def converted(value, convert):
    return [convert(v) for v in value] if isinstance(value, list) else convert(value)


def with_factors(arguments, convert):
    names = [n for n in arguments if n.endswith(FACTORS)]
    return arguments | {name: converted(arguments[name], convert) for name in names}


# ---- by hand as by autograd ----


@EACH_OPERATOR
@pytest.mark.parametrize("place", PLACES)
def test_bits_of_autograd(place, projection, kind):
    for spec in (SPEC, replace(SPEC, sharing="outer", slices=1), replace(SPEC, tokens=0)):
        arguments, grad_out = arguments_of(spec, place, projection, kind)
        want = by_autograd(projection, kind, arguments, grad_out)
        found = by_hand(kind, arguments, grad_out)
        assert set(found) == set(want)
        for name, grad in found.items():
            assert same_bits(grad, want[name]), name
            assert spec.tokens or not grad.any(), f"{name}: zeros, whatever was in memory"


@EACH_KIND
@pytest.mark.parametrize("place", FEW_PLACES)
def test_rows_of_grad_out_in_any_strides(place, kind):
    arguments, grad_out = arguments_of(SPEC, place, "w2", kind)
    spread = torch.full((*grad_out.shape[:-2], grad_out.size(-2) + 1, grad_out.size(-1) + 8), 1e9)
    spread = spread.to(grad_out)[..., :-1, :-8].copy_(grad_out)
    want = by_hand(kind, arguments, grad_out)
    for name, grad in by_hand(kind, arguments, spread).items():
        assert same_bits(grad, want[name]), name


@pytest.mark.parametrize("place", FEW_PLACES)
def test_rows_of_a_down_delta_in_three_dimensions(place):
    """As the forward takes them; so does the buffer of their gradient."""
    arguments, grad_out = arguments_of(SPEC, place, "w2", "delta")
    want = by_hand("delta", arguments, grad_out)["x"]
    cube = arguments["x"].view(*arguments["topk_ids"].shape, -1)
    found = by_hand("delta", arguments | {"x": cube}, grad_out)["x"]
    assert found.shape == cube.shape and same_bits(found.flatten(0, 1), want)
    to = torch.empty_like(cube)
    backward("delta", arguments | {"x": cube}, grad_out, grads=ProjectionGradients(x=to))
    assert same_bits(to, found)
    spread = torch.empty(cube.size(0), cube.size(1) + 1, cube.size(2)).to(cube)[:, :-1]
    with pytest.raises(ValueError, match=r"grads.x has strides .*, expected equally spaced rows"):
        backward("delta", arguments | {"x": cube}, grad_out, grads=ProjectionGradients(x=spread))


@pytest.mark.parametrize("place", FEW_PLACES)
def test_an_unknown_number_of_experts(place):
    """Factors that all experts share, in a delta that is not told how many there are."""
    spec = replace(SPEC, sharing="expanded", bias=False)
    arguments, grad_out = arguments_of(spec, place, "w2", "delta")
    shared = {name: arguments[name][:, :1].contiguous() for name in FACTORS}
    want = by_autograd("w2", "delta", arguments | shared | {"num_experts": None}, grad_out)
    found = by_hand("delta", arguments | shared | {"num_experts": None}, grad_out)
    for name, grad in found.items():
        assert same_bits(grad, want[name]), name


# ---- dtypes of factors and of gradients ----


@EACH_OPERATOR
@pytest.mark.parametrize("place", SIXTEEN_BITS)
@pytest.mark.parametrize("sharing", ["per_expert", "outer", "expanded"])
def test_float32_factors(sharing, place, projection, kind):
    """Beside 16 bits: rounded on their way in, with gradients in float32."""
    arguments, grad_out = arguments_of(replace(SPEC, sharing=sharing), place, projection, kind)
    wide = with_factors(arguments, torch.Tensor.float)
    assert same_bits(forward(projection, kind, wide), forward(projection, kind, arguments))
    narrow = by_hand(kind, arguments, grad_out)
    exact = by_hand(kind, arguments, grad_out, float32=True)
    grads = by_autograd(projection, kind, wide, grad_out)
    by_operator = by_hand(kind, wide, grad_out)
    for name, grad in grads.items():
        factor, routing = "lora" in name, kind == "layer" and name == "topk_weights"
        assert grad.dtype == (torch.float32 if factor else narrow[name].dtype), name
        assert same_bits(grad, by_operator[name]), name
        assert routing or same_bits(grad.to(narrow[name].dtype), narrow[name]), name
        assert not factor or same_bits(grad, exact[name]), name


@EACH_OPERATOR
@pytest.mark.parametrize("place", SIXTEEN_BITS)
def test_float32_factors_between_the_numbers_of_16_bits(place, projection, kind):
    """Accurate as those of the layer in torch that rounds them."""
    arguments, grad_out = arguments_of(replace(SPEC, tokens=40), place, projection, kind)
    between = with_factors(arguments, lambda t: t.float() * (1 + 2.0**-9))
    rounded = with_factors(between, lambda t: t.to(place[1]))
    assert same_bits(*(forward(projection, kind, each) for each in (between, rounded)))
    found, want = (by_hand(kind, each, grad_out, float32=True) for each in (between, rounded))
    assert all(same_bits(found[name], want[name]) for name in want)
    if kind == "layer":
        assert_gradients(of_layer(between, grad_out), between, grad_out, place[1])
    if kind == "projection":
        exact = samples(of_projection(between, grad_out), between, grad_out)
        assert_samples([exact], place[1])


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
    assert same_bits(moelora.fused_moe_lora_gemm(**wide), moelora.fused_moe_lora_gemm(**arguments))
    want = by_hand("projection", plain, grad_out, float32=True)
    for name, grad in of_projection(wide, grad_out).items():
        assert same_bits(grad, want[name]), name


@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]])
def test_strides_of_float32_factors(place):
    """Also those that no 16-byte access reads."""
    for projection in DELTAS:
        for kind in KINDS:
            arguments, grad_out = arguments_of(SPEC, place, projection, kind)
            want = by_hand(kind, arguments, grad_out, float32=True)

            def apart(t):
                wide = torch.full((*t.shape[:-1], t.size(-1) + 3), float("nan")).to(t.device)
                wide[..., 1:-2] = t.float()
                return wide[..., 1:-2]

            found = by_hand(kind, with_factors(arguments, apart), grad_out, float32=True)
            assert all(same_bits(found[name], want[name]) for name in want)


@EACH_KIND
def test_factors_have_one_dtype(kind):
    arguments, grad_out = arguments_of(SPEC, ("cpu", torch.bfloat16), "w2", kind)
    name = "w2_lora_a" if kind == "layer" else "lora_a"
    mixed = arguments | {name: arguments[name].float()}
    for call in (lambda: forward("w2", kind, mixed), lambda: by_hand(kind, mixed, grad_out)):
        with pytest.raises(ValueError, match=r"lora_b.* has dtype bfloat16, expected float32 as"):
            call()
    half = with_factors(arguments, torch.Tensor.half)
    with pytest.raises(ValueError, match=r"lora_a.* has dtype float16, expected bfloat16"):
        forward("w2", kind, half)


# ---- into given memory ----


def buffers(arguments, kind, device, dtype=None, fill=0.0):
    """Gradients to write to, each in guard bands of its own."""
    guarded = {}

    def new(name, value):
        if isinstance(value, list):
            return [new(f"{name}[{i}]", v) for i, v in enumerate(value)]
        own = dtype if dtype and is_summed(name) else value.dtype
        guarded[name] = guarded_empty(value.shape, own, device)
        return guarded[name].tensor.fill_(fill)

    names = [n for n in gradients_of(kind)._fields if arguments.get(n) is not None]
    return gradients_of(kind)(**{n: new(n, arguments[n]) for n in names}), guarded


@EACH_OPERATOR
@pytest.mark.parametrize("place", PLACES)
def test_written(place, projection, kind):
    """What was there before does not matter, and nothing beside it is written."""
    for spec in (SPEC, replace(SPEC, sharing="outer", routing="few"), replace(SPEC, tokens=0)):
        arguments, grad_out = arguments_of(spec, place, projection, kind)
        want = by_hand(kind, arguments, grad_out)
        grads, guarded = buffers(arguments, kind, place[0], fill=float("nan"))
        assert backward(kind, arguments, grad_out, grads=grads) is grads
        for name, memory in guarded.items():
            memory.check(name)
            assert same_bits(memory.tensor, want[name]), name


@EACH_KIND
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("wide", [False, True], ids=["factors16", "factors32"])
@pytest.mark.parametrize("place", PLACES)
def test_accumulated(place, wide, dtype, kind):
    """To what is there, rounded once; the gradients of x and of routing weights are written."""
    arguments, grad_out = arguments_of(replace(SPEC, routing="few"), place, "w13", kind)
    alone = by_hand(kind, arguments, grad_out, float32=True)
    if wide:
        arguments = with_factors(arguments, torch.Tensor.float)
    grads, guarded = buffers(arguments, kind, place[0], dtype, fill=0.5)
    backward(kind, arguments, grad_out, grads=grads, accumulate=True)
    for name, memory in guarded.items():
        memory.check(name)
        want = alone[name] + 0.5 if is_summed(name) else alone[name]
        want = want.to(memory.tensor.dtype)
        assert same_bits(memory.tensor, want), name


@EACH_KIND
@pytest.mark.parametrize("place", FEW_PLACES)
def test_buffers_of_any_strides(place, kind):
    arguments, grad_out = arguments_of(SPEC, place, "w2", kind)
    want = by_hand(kind, arguments, grad_out)
    name = "w2_lora_a" if kind == "layer" else "lora_a"
    loras, experts, rank, inter = arguments[name].shape
    memory = torch.full((experts, loras, rank, inter + 5), 7.0, dtype=place[1], device=place[0])
    to = memory.transpose(0, 1)[..., 2 : 2 + inter]
    backward(kind, arguments, grad_out, grads=gradients_of(kind)(**{name: to}))
    assert same_bits(to, want[name])
    to.fill_(7.0)
    assert (memory == 7.0).all()


@EACH_KIND
@pytest.mark.parametrize("place", FEW_PLACES)
def test_wanted(place, kind):
    """Each gradient has the bits that it has among all, whichever others are computed."""
    on_input = replace(SPEC, top_k=1, weight_on_input=True)
    for spec in (SPEC, on_input) if kind == "layer" else (SPEC,):
        arguments, grad_out = arguments_of(spec, place, "w13", kind)
        every = by_hand(kind, arguments, grad_out)
        fields = gradients_of(kind)._fields
        for names in (*((n,) for n in fields), factors_of(kind), fields[:2], ()):
            found = by_hand(kind, arguments, grad_out, wanted=names)
            present = [n for n in every if n.split("[")[0] in names]
            assert sorted(found) == sorted(present)
            assert all(same_bits(found[n], every[n]) for n in present), names


# ---- sparse ----

SPARSE = Spec(tokens=9, top_k=2, experts=5, hidden=72, inter=40, ranks=(8, 3, 16), mix="many")
SPARSE_SPECS = {
    "per_expert": SPARSE,
    "outer": replace(SPARSE, sharing="outer", slices=1),
    "remote": replace(SPARSE, remote=2, routing="out_of_range"),
    "long": replace(SPARSE, tokens=40, experts=2),
    "no_rows": replace(SPARSE, tokens=0),
}
NOTHING = 7.0  # what is not written


def sparse_setting(name, place, projection, kind):
    arguments, grad_out = arguments_of(SPARSE_SPECS[name], place, projection, kind)
    b = factor_list(arguments[factors_of(kind)[-1]])[0]
    weights = arguments.get("w13" if kind == "layer" else "w")
    pairs, count = touched_pairs(
        arguments["topk_ids"],
        arguments["token_lora_mapping"],
        b.size(0),
        arguments["num_experts"] if weights is None else weights.size(0),
        arguments.get("expert_map"),
    )
    assert count == (pairs >= 0).sum() == pairs.max() + 1
    return arguments, grad_out, pairs, int(count)


def sparse_buffers(kind, arguments, pairs, count, dtype=None):
    """Gradients to write to, of the pairs alone where experts have factors of their own."""

    def buffer(factor):
        sparse = factor.size(1) == pairs.size(1)
        shape = (count, *factor.shape[2:]) if sparse else factor.shape
        return torch.full(shape, NOTHING, dtype=dtype or factor.dtype, device=factor.device)

    made = {n: converted(arguments[n], buffer) for n in factors_of(kind)}
    return gradients_of(kind)(**made)


@EACH_OPERATOR
@pytest.mark.parametrize("name", SPARSE_SPECS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_touched_pairs_have_the_bits_of_dense_gradients(place, name, projection, kind):
    arguments, grad_out, pairs, count = sparse_setting(name, place, projection, kind)
    for given in (arguments, with_factors(arguments, torch.Tensor.float)):
        dense = backward(kind, given, grad_out, wanted=factors_of(kind))
        to = sparse_buffers(kind, given, pairs, count + 1)
        found = backward(kind, given, grad_out, grads=to, pairs=pairs)
        touched = pairs >= 0
        for factor in factors_of(kind):
            both = (factor_list(getattr(grads, factor)) for grads in (found, dense))
            for got, want in zip(*both, strict=True):
                if want.size(1) == pairs.size(1):
                    assert same_bits(got[:count], want[touched]), factor
                    assert not want[~touched].any(), f"{factor}: a pair is missing"
                    assert (got[count:] == NOTHING).all(), f"{factor}: written without a pair"
                else:
                    assert same_bits(got, want), factor


@EACH_KIND
@pytest.mark.parametrize("name", ["per_expert", "long"])
@pytest.mark.parametrize("place", FEW_PLACES)
def test_sparse_gradients_accumulate(place, name, kind):
    arguments, grad_out, pairs, count = sparse_setting(name, place, "w13", kind)
    to = sparse_buffers(kind, arguments, pairs, count, torch.float32)
    backward(kind, arguments, grad_out, grads=to, pairs=pairs)
    once = [g.clone() for factor in factors_of(kind) for g in factor_list(getattr(to, factor))]
    backward(kind, arguments, grad_out, grads=to, pairs=pairs, accumulate=True)
    twice = [g for factor in factors_of(kind) for g in factor_list(getattr(to, factor))]
    assert all(torch.equal(b, 2 * a) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("place", FEW_PLACES)
def test_any_order_and_any_part_of_the_pairs(place):
    arguments, grad_out, pairs, count = sparse_setting("per_expert", place, None, "layer")
    dense = backward("layer", arguments, grad_out, wanted=FACTORS_OF_LAYER)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(pairs)
    untouched = (pairs < 0).nonzero()[0].tolist()
    some = torch.where(pairs >= 0, order[pairs.long()], -1).int()
    some[some == 1] = 1000  # out of range: not wanted
    some[tuple(untouched)] = 1
    to = sparse_buffers("layer", arguments, pairs, count)
    found = backward("layer", arguments, grad_out, grads=to, pairs=some)
    for factor in FACTORS_OF_LAYER:
        both = (factor_list(getattr(grads, factor)) for grads in (found, dense))
        for got, want in zip(*both, strict=True):
            for l, e in (pairs >= 0).nonzero().tolist():
                if some[l, e] < count:
                    assert same_bits(got[some[l, e]], want[l, e])
            assert not got[1].any(), "a pair without tokens has zeros"


# ---- under torch.compile, in a CUDA graph ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]])
def test_compiled(place, kind):
    arguments, grad_out = arguments_of(SPEC, place, "w13", kind)
    wide = with_factors(arguments, torch.Tensor.float)
    want = by_hand(kind, wide, grad_out)
    given = with_leaves(wide)
    call = torch.compile(
        lambda given: forward("w13", kind, given), backend="aot_eager", fullgraph=True
    )
    call(given).backward(grad_out)
    for name, grad in grads_of(wide, given).items():
        assert same_bits(grad, want[name]), name


@pytest.mark.parametrize("kind", KINDS)
@EACH_PROJECTION
@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_a_captured_step_reads_the_factors_of_its_replay(place, projection, kind):
    """Float32 ones are rounded in the graph, which accumulates and waits for the GPU nowhere."""
    arguments, grad_out = arguments_of(
        replace(SPEC, tokens=60), (place, torch.bfloat16), projection, kind
    )
    wide = with_factors(arguments, torch.Tensor.float)
    grads, _ = buffers(wide, kind, place, torch.float32)

    def step():
        out = forward(projection, kind, wide)
        backward(kind, wide, grad_out, grads=grads, accumulate=True)
        return out

    captured = Captured(step)
    with no_waits():
        step()
    for name in FACTORS:
        for factor in factor_list(wide[name]):
            factor.mul_(1.5)
    for grad in flat(grads._asdict()).values():
        grad.fill_(0.5)
    assert same_bits(captured.replay(), forward(projection, kind, wide))
    want, _ = buffers(wide, kind, place, torch.float32, fill=0.5)
    backward(kind, wide, grad_out, grads=want, accumulate=True)
    for name, grad in flat(grads._asdict()).items():
        assert same_bits(grad, flat(want._asdict())[name]), name
