"""What a backward promises beside its values: the same bits, tenants apart, and what it costs."""

from dataclasses import replace

import pytest
import torch
from backward_cases import LAYER, OPERATORS, converted, each
from cases import PER_TOKEN, Problem, Spec, same_bits
from conftest import PLACES, on_gpu
from gradient_cases import FEW_PLACES, by_autograd, by_hand, flat, grad_like, leaves, saved_bytes
from quantized_cases import ALL_FORMATS, NATIVE, build, forms_of
from test_parallel import expert_parallel

import moelora
from moelora import _C

LORAS = 4
TENANTS = Spec(
    tokens=70, top_k=2, experts=3, hidden=136, inter=72, ranks=(8, 16, 4, 70), mix="many"
)
SPECS = {
    "per_expert": TENANTS,
    "outer": replace(TENANTS, sharing="outer", slices=1),
    "biases": replace(TENANTS, bias=True, activation="swigluoai"),
    "weight_on_input": replace(TENANTS, top_k=1, weight_on_input=True),
    "expert_map": replace(TENANTS, remote=2, routing="out_of_range"),
    "relu2": replace(TENANTS, activation="relu2", slices=1),
}


every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def problem(spec, place) -> tuple[Problem, torch.Tensor]:
    p = replace(spec, dtype=place[1]).build().to(place[0])
    return p, grad_like(p.hidden_states.shape, place[1], place[0])


def by_token(arguments: dict, rows: torch.Tensor) -> torch.Tensor:
    """What each token has of x, of its rows of a projection, or of their gradients."""
    return rows.unflatten(0, (len(arguments["topk_ids"]), -1))


def only(arguments: dict, tokens: torch.Tensor) -> dict:
    """The call of some tokens, in their order."""
    names = [n for n in (*PER_TOKEN, "x") if arguments.get(n) is not None]
    rows = {n: by_token(arguments, arguments[n])[tokens].flatten(0, 1) for n in names}
    return arguments | rows


def base(operator, arguments: dict) -> dict:
    """The call without adapters; a delta is one of them, which no token carries."""
    if operator.kind == "delta":
        mapping = arguments["token_lora_mapping"]
        return arguments | {"token_lora_mapping": torch.full_like(mapping, -1)}
    return {n: value for n, value in arguments.items() if "lora" not in n}


def factors(grads: dict) -> dict:
    return {name: grad for name, grad in grads.items() if "lora" in name}


@every_spec
@pytest.mark.parametrize("place", PLACES)
def test_the_forward_has_the_bits_of_serving(spec, place):
    p, _ = problem(spec, place)
    serving = moelora.fused_experts_lora(**p.kwargs())
    saving, saved = moelora.fused_experts_lora_saving(**p.kwargs())
    x = p.hidden_states.detach().requires_grad_()
    recorded = moelora.fused_experts_lora(**p.kwargs() | {"hidden_states": x})
    assert recorded.requires_grad
    assert same_bits(saving, serving) and same_bits(recorded.detach(), serving)
    assert not any(t.requires_grad for t in saved)


@pytest.mark.parametrize("place", PLACES)
def test_deterministic(place):
    """Every run and any number of threads give the same bits."""
    spec = replace(TENANTS, tokens=600, bias=True)
    p, grad_out = problem(spec, place)
    want = by_hand(p.kwargs(), grad_out)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            for name, grad in by_hand(p.kwargs(), grad_out).items():
                assert same_bits(grad, want[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


def assert_alone_in_another_stack(operator, arguments, grad_out, adapters) -> None:
    """The bits of gradients of `adapters` are those of steps with their own tokens alone, each in a
    stack of its own."""
    together = operator.by_hand(arguments, grad_out)
    for adapter in adapters:
        tokens = (arguments["token_lora_mapping"] == adapter).nonzero().squeeze(1)

        def own(value, adapter=adapter):
            return value[adapter : adapter + 1].contiguous()

        names = (*operator.factors, "lora_ranks", "lora_scalings")
        alone = only(arguments, tokens) | {n: converted(arguments[n], own) for n in names}
        alone["token_lora_mapping"] = torch.zeros_like(tokens, dtype=torch.int32)
        for name, grad in factors(operator.by_hand(alone, grad_out[tokens])).items():
            assert grad.any() and same_bits(grad[0], together[name][adapter]), (name, adapter)


@each(OPERATORS)
@every_spec
@pytest.mark.parametrize("place", PLACES)
def test_an_adapter_trains_as_if_it_were_alone(spec, place, operator):
    assert_alone_in_another_stack(operator, *operator.problem(spec, place), range(LORAS))


@pytest.mark.parametrize("place", FEW_PLACES)
def test_one_of_more_pairs_than_a_sort_has_keys(place):
    """A pair has half a row on average, others none."""
    spec = replace(TENANTS, tokens=1000, top_k=4, experts=64, hidden=64, inter=32)
    spec = replace(spec, ranks=(8, 16, 3) * 40)
    assert_alone_in_another_stack(LAYER, *LAYER.problem(spec, place), [0, 50, 119])


@pytest.mark.parametrize("place", PLACES)
def test_experts_spread_over_ranks(place):
    """An expert's factors get the bits that they get among all experts; the rest adds up."""
    device, dtype = place
    p, grad_out = problem(replace(TENANTS, experts=6), ("cpu", dtype))
    owner = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.int32)
    places = [p, *(expert_parallel(p, owner, rank) for rank in range(2))]
    whole, *parts = [by_hand(part.to(device).kwargs(), grad_out.to(device)) for part in places]
    bounds = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    )
    for name in ("hidden_states", "topk_weights"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name], **bounds)
    for name, grad in factors(whole).items():
        for rank, part in enumerate(parts):
            local = grad[:, (owner == rank).to(device)]
            assert local.any() and same_bits(part[name], local), name


@each(OPERATORS)
@every_spec
@pytest.mark.parametrize("place", PLACES)
def test_base_tokens(spec, place, operator):
    """Have the bits of a call without adapters; any token has those of a smaller batch."""
    arguments, grad_out = operator.problem(spec, place)
    mixed = operator.by_hand(arguments, grad_out)
    without = operator.by_hand(base(operator, arguments), grad_out)
    rows = arguments["token_lora_mapping"] < 0
    assert rows.any() and not rows.all()
    some = torch.arange(spec.tokens, device=place[0])[3::5]
    fewer = operator.by_hand(only(arguments, some), grad_out[some])
    for name in (operator.x, "topk_weights"):
        of_all = by_token(arguments, mixed[name])
        assert same_bits(of_all[rows], by_token(arguments, without[name])[rows])
        assert not same_bits(mixed[name], without[name])
        assert same_bits(fewer[name], of_all[some].flatten(0, 1))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g64_zp", "fp8_channel", "fp8_block_w8a8"])
@pytest.mark.parametrize("place", FEW_PLACES[1:])
def test_promises_beside_quantized_weights(name, place):
    """Deterministic for any number of threads; an adapter alone, base tokens without adapters."""
    spec = replace(TENANTS, hidden=160, inter=96, tokens=40)
    p = build(spec, ALL_FORMATS[name], place[1]).to(place[0])
    grad_out = grad_like(p.dense.hidden_states.shape, place[1], place[0])
    mapping = p.dense.token_lora_mapping
    together = by_hand(p.kwargs(), grad_out)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = by_hand(p.kwargs(), grad_out)
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(again[field], grad) for field, grad in together.items())
    own = (mapping == 2).nonzero().squeeze(1)
    alone = only(p.kwargs(), own)
    for field, grad in factors(by_hand(alone, grad_out[own])).items():
        assert same_bits(grad[2], together[field][2]) and grad[2].any(), field
    without = by_hand(p.base().kwargs(), grad_out)
    for field in ("hidden_states", "topk_weights"):
        assert same_bits(without[field][mapping < 0], together[field][mapping < 0]), field


@pytest.mark.parametrize(
    ("operator", "where"),
    [(o, where) for o in OPERATORS for where in (o.x, "grad_out", *o.factors)],
    ids=str,
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_with_its_tenant(operator, where, value, place):
    arguments, grad_out = operator.problem(TENANTS, place)
    clean = operator.by_hand(arguments, grad_out)
    sick = 1
    tokens = arguments["token_lora_mapping"] == sick
    changed = arguments | {"grad_out": grad_out}

    def made_sick(t):
        t = t.clone()
        whose = (t, sick) if where in operator.factors else (by_token(arguments, t), tokens)
        whose[0][whose[1]] = value
        return t

    changed[where] = converted(changed[where], made_sick)
    found = operator.by_hand(changed, changed.pop("grad_out"))
    assert not all(grad.isfinite().all() for grad in found.values())
    others = torch.arange(LORAS) != sick
    for name, grad in found.items():
        was = clean[name]
        if "lora" in name:
            assert same_bits(grad[others], was[others]), name
        else:
            rows = (by_token(arguments, t)[~tokens] for t in (grad, was))
            assert same_bits(*rows), name


@pytest.mark.parametrize("place", PLACES)
def test_what_no_token_uses_gets_zeros(place):
    device, _ = place
    p, grad_out = problem(replace(TENANTS, ranks=(8, 16, 4, 6), spare_rank=3), place)
    unused = torch.tensor([True, False, True, False], device=device)
    mapping = torch.where(p.token_lora_mapping == 0, 1, p.token_lora_mapping)
    enabled = torch.tensor([True, True, False, True], device=device)
    arguments = p.kwargs() | {"token_lora_mapping": mapping.int(), "adapter_enabled": enabled}
    for name, grad in factors(by_autograd(arguments, grad_out)).items():
        assert not grad[unused].any(), name
        assert grad[1].any() and grad[3].any(), name
        rank = 3 if "lora_b" in name else 2
        assert not grad[3].narrow(rank - 1, 6, 13).any(), name


@each(OPERATORS)
@every_spec
@pytest.mark.parametrize("place", FEW_PLACES)
def test_saved_bytes(spec, place, operator):
    """Of a layer, beside the arguments: the projection before its activation, and rows of ranks; of
    others nothing."""
    arguments, _ = operator.problem(spec, place)
    arguments = leaves(arguments, (operator.x,))
    result = []
    storages = saved_bytes(lambda: result.append(operator(**arguments)))
    values = [v for a in arguments.values() for v in (a if isinstance(a, list) else [a])]
    own = {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}
    extra = sum(size for where, size in storages.items() if where not in own)
    rows, rank = arguments["topk_ids"].numel(), max(spec.ranks)
    numbers = 0
    if operator is LAYER:
        numbers = rows * (arguments["w13"].shape[1] + (spec.slices + 1) * rank)
    assert storages and extra == numbers * place[1].itemsize


def kernels():
    """What a backward can be forced to: on a CPU rows that all operators share."""
    for name in _C.usable():
        if name.startswith("back_"):
            yield from (on_gpu(name, form, "cuda") for form in forms_of(name))
        elif name.startswith("gemm_") and not name.endswith(("sm80", "sm90")):
            yield pytest.param(name, NATIVE, "cpu")


@pytest.mark.parametrize(("variant", "form", "device"), list(kernels()))
def test_kernels(variant, form, device):
    """All of one dtype agree, and the plan says which ran."""
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    dtype = dtypes[variant.split("_")[1]]
    p, grad_out = problem(TENANTS, (device, dtype))
    if form != NATIVE:
        p = build(replace(TENANTS, hidden=192, inter=128), ALL_FORMATS[form], dtype).to(device)
        grad_out = grad_like(p.kwargs()["hidden_states"].shape, dtype, device)
    _, saved = moelora.fused_experts_lora_saving(**p.kwargs())
    want = flat(moelora.fused_experts_lora_backward(grad_out, saved, **p.kwargs())._asdict())
    try:
        _C.force_variant(variant)
        found = moelora.fused_experts_lora_backward(grad_out, saved, **p.kwargs())
        assert _C.last_plan().split()[0] == f"backward={variant}"
    finally:
        _C.force_variant(None)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    for name, grad in flat(found._asdict()).items():
        scale = max(1.0, want[name].abs().max().item())
        assert (grad - want[name]).abs().max() <= limit * scale, name
        assert device == "cpu" or same_bits(grad, want[name]), name


# ---- what a backward writes to ----


@pytest.mark.parametrize("name", ["per_expert", "biases", "relu2", "weight_on_input"])
@pytest.mark.parametrize("place", FEW_PLACES)
def test_the_backward_of_autograd_may_overwrite_what_it_saved(place, name):
    """With the same bits; but not while the graph is kept, nor what the caller holds."""
    p, grad_out = problem(SPECS[name], place)
    want = by_hand(p.kwargs(), grad_out)
    given = p.kwargs() | {"hidden_states": p.hidden_states.detach().requires_grad_()}
    loss = (moelora.fused_experts_lora(**given).float() * grad_out.float()).sum()
    for keeps in (True, True, False):
        found = torch.autograd.grad(loss, given["hidden_states"], retain_graph=keeps)[0]
        assert same_bits(found, want["hidden_states"])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, given["hidden_states"])
    out, saved = moelora.fused_experts_lora_saving(**given)
    assert not any(t.requires_grad for t in saved)
    before = [t.clone() for t in saved]
    out.backward(grad_out)
    assert all(same_bits(now, was) for now, was in zip(saved, before, strict=True))
    assert same_bits(given["hidden_states"].grad, want["hidden_states"])
