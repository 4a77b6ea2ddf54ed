"""No backward: whatever autograd would record raises, and names the argument and the way out."""

import pytest
import torch
from cases import same_bits
from glue_cases import TOP_K, I, K, M, inputs, op_calls, operator
from torch.autograd import forward_ad

import moelora

CALLS = op_calls()


def with_grad(args, place, index=None):
    """The arguments, one of which requires a gradient."""
    args = [list(a) if isinstance(a, list) else a for a in args]
    if index is None:
        args[place] = args[place].detach().clone().requires_grad_()
    else:
        args[place][index] = args[place][index].detach().clone().requires_grad_()
    return args


def floating():
    """(name, its arguments, place, index in a list, what the message calls it)"""
    for name, args in CALLS:
        for place, (argument, value) in enumerate(
            zip(operator(name)._schema.arguments, args, strict=False)
        ):
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, item in items:
                if isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel():
                    suffix = "" if index is None else f"[{index}]"
                    yield pytest.param(
                        *(name, args, place, index, argument.name + suffix),
                        id=f"{name}-{argument.name}{suffix}",
                    )


@pytest.mark.parametrize(("name", "args", "place", "index", "called"), list(floating()))
def test_every_argument_of_every_operator(name, args, place, index, called):
    given = with_grad(args, place, index)
    before = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in given]
    message = rf"{name}: {called.replace('[', chr(92) + '[')} requires a gradient.*no_grad\(\)"
    with pytest.raises(RuntimeError, match=message):
        operator(name)(*given)
    for was, now in zip(before, given, strict=True):
        assert not isinstance(was, torch.Tensor) or same_bits(was, now.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["fused_experts_lora", "moe_lora_gate_up_delta"])
def test_without_grad_mode_it_runs(name, mode):
    args = next(args for called, args in op_calls() if called == name)
    with mode():
        want = operator(name)(*args)
        got = operator(name)(*with_grad(args, 1))
    assert want is got is None or same_bits(want, got)


def test_wrappers():
    given = inputs()
    for name in ("hidden_states", "w13", "topk_weights", "w2_lora_a", "w13_bias"):
        grad = {**given, name: given[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=rf"{name}(\[0\])? requires a gradient"):
            moelora.fused_experts_lora(**grad)
        with torch.no_grad():
            want = moelora.fused_experts_lora(**grad)
        grad[name] = grad[name].detach()
        assert same_bits(moelora.fused_experts_lora(**grad), want)
    out = torch.zeros(M, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="out requires a gradient"):
        moelora.fused_experts_lora(**given, out=out)
    assert not out.detach().any()
    assert not moelora.fused_experts_lora(**given).requires_grad


def down_delta(out):
    """Adds a delta to out (M, top_k, K), with no gradient anywhere."""
    given = inputs()
    return moelora.moe_lora_down_delta(
        *(torch.ones(M * TOP_K, I), None, given["topk_ids"]),
        token_lora_mapping=given["token_lora_mapping"],
        lora_a=given["w2_lora_a"],
        lora_b=given["w2_lora_b"],
        out=out,
    )


def test_in_place_deltas_on_what_has_a_history():
    base = torch.ones(M, TOP_K, K, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="out requires a gradient"):
        down_delta(base)
    assert (base == 2).all()


def test_a_backward_notices_that_what_it_saved_was_written():
    w, h = torch.ones(K, 3, requires_grad=True), torch.ones(M, TOP_K, K)
    y = h @ w
    down_delta(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_what_an_operator_writes_has_another_version(name):
    args = next(args for called, args in op_calls() if called == name)
    schema = operator(name)._schema.arguments
    tensors = [(a, t) for a, t in zip(schema, args, strict=False) if isinstance(t, torch.Tensor)]
    before = [t._version for _, t in tensors]
    operator(name)(*args)
    for (argument, tensor), was in zip(tensors, before, strict=True):
        assert (tensor._version > was) == bool(argument.alias_info), argument.name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    given = inputs()
    w2 = given.pop("w2").requires_grad_()

    def layer(w2):
        return moelora.fused_experts_lora(w2=w2 * 2, **given)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(RuntimeError, match="w2 requires a gradient"):
        compiled(w2)
    with torch.no_grad():
        assert same_bits(compiled(w2), layer(w2))
    inside = torch.compile(torch.no_grad()(layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = layer(w2)
    assert same_bits(inside(w2), want)


def test_torch_func():
    """What a transform asks about must not be taken for a constant; what it does not ask may."""
    given = inputs()
    x = given.pop("hidden_states")

    def layer(x):
        return moelora.fused_experts_lora(x, **given).sum()

    def pack(w):
        return moelora.prepack_weights(w).data.sum()

    w = torch.stack([given["w13"]] * 2)
    func = torch.func
    for transformed, argument in (
        (func.grad(layer), x),
        (lambda x: func.jvp(layer, (x,), (x,)), x),
        (func.vmap(func.grad(pack)), w),
        (func.grad(lambda w: func.vmap(pack)(w).sum()), w),
    ):
        with pytest.raises(RuntimeError, match=r"(hidden_states|w) requires a gradient"):
            transformed(argument)
    scale = torch.ones(())
    assert torch.equal(func.grad(lambda s: s * layer(x))(scale), layer(x))
    assert torch.equal(func.jvp(lambda s: s * layer(x), (scale,), (scale,))[1], layer(x))
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        func.vmap(layer)(torch.stack([x, x]))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_mode(grad_mode):
    given = inputs()
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        given["w2"] = forward_ad.make_dual(given["w2"], torch.ones_like(given["w2"]))
        with pytest.raises(RuntimeError, match="w2 requires a gradient"):
            moelora.fused_experts_lora(**given)
