"""What autograd does with the operators: it records a layer, and refuses all else by name."""

import weakref

import pytest
import torch
from cases import same_bits
from glue_cases import K, M, inputs, op_calls, operator, tensors_in, with_another
from gradient_cases import assert_bits, by_autograd, by_hand, grad_like, leaves
from torch.autograd import forward_ad

import moelora
from moelora.operators.schema import BACKWARDS, OF_LAYER

CALLS = op_calls()
TRAINED = tuple(OF_LAYER.places)
RECORDED = {name: tuple(backward.places) for name, backward in BACKWARDS.items()}
GRAD_OUT = grad_like((M, K), torch.float32)


def with_grad(args, place, index=None):
    """The arguments, one of which requires a gradient."""
    tensor = args[place] if index is None else args[place][index]
    return with_another(args, place, index, tensor.detach().clone().requires_grad_())


def floating():
    """(name, its arguments, place, index in a list, argument, what a message calls it)"""
    for name, args in CALLS:
        schema = operator(name)._schema.arguments
        for place, index, tensor in tensors_in(args):
            if tensor.is_floating_point() and tensor.numel():
                argument, suffix = schema[place].name, "" if index is None else f"[{index}]"
                yield pytest.param(
                    *(name, args, place, index, argument, suffix), id=f"{name}-{argument}{suffix}"
                )


@pytest.mark.parametrize(("name", "args", "place", "index", "argument", "suffix"), list(floating()))
def test_every_argument_of_every_operator(name, args, place, index, argument, suffix):
    given = with_grad(args, place, index)
    if name.endswith("_delta") and place:  # its first argument becomes part of a graph
        given[0] = given[0].clone()
    before = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in given]
    if argument in RECORDED.get(name, ()):
        results = operator(name)(*given)
        if results is None:  # it writes to its first argument
            results, before[0] = given[0], None
        (results if isinstance(results, torch.Tensor) else results[0]).sum().backward()
        leaf = given[place] if index is None else given[place][index]
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
    else:
        called = (argument + suffix).replace("[", r"\[")
        message = rf"{name}: {called} requires a gradient, and .*({argument}|out=|create_graph)"
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


def test_frozen_weights():
    given = inputs()
    packed = moelora.prepack_weights(given["w13"])
    packed.data.requires_grad_()
    trained = {n: given[n].clone().requires_grad_() for n in ("w13", "w2", "lora_scalings")}
    for name, value in (*trained.items(), ("w13", packed)):
        reason = "has no gradient" if name == "lora_scalings" else "weights of experts are frozen"
        with pytest.raises(RuntimeError, match=rf"{name} requires a gradient, and .*{reason}"):
            moelora.fused_experts_lora(**given | {name: value})


# ---- what recorded calls do ----


def test_every_subset_of_arguments():
    """Only what requires a gradient gets one, with the bits that it has among all."""
    given = inputs()
    every = by_autograd(given, GRAD_OUT, TRAINED)
    for name in TRAINED:
        for grad_name, grad in by_autograd(given, GRAD_OUT, (name,)).items():
            assert same_bits(grad, every[grad_name])
    half = [given["w13_lora_a"][0].detach().requires_grad_(), given["w13_lora_a"][1]]
    moelora.fused_experts_lora(**given | {"w13_lora_a": half}).backward(GRAD_OUT)
    assert same_bits(half[0].grad, every["w13_lora_a[0]"]) and half[1].grad is None


def test_gradients_of_every_layout():
    """The gradient of the result may be expanded, transposed or sliced."""
    given = inputs()
    for grad_out in (
        torch.ones(()).expand(M, K),
        GRAD_OUT.t().contiguous().t(),
        torch.cat([GRAD_OUT, GRAD_OUT], 1)[:, ::2],
        torch.cat([GRAD_OUT, GRAD_OUT], 1)[:, 3 : 3 + K],
    ):
        want = by_autograd(given, grad_out.contiguous(), TRAINED)
        assert_bits(by_autograd(given, grad_out, TRAINED), want)


def test_routing_weights_of_16_bits():
    given = inputs(dtype=torch.bfloat16)
    given["topk_weights"] = given["topk_weights"].bfloat16()
    grad_out = GRAD_OUT.bfloat16()
    grads = by_autograd(given, grad_out, ("topk_weights",))
    assert grads["topk_weights"].dtype == torch.bfloat16
    wide = by_hand(given | {"topk_weights": given["topk_weights"].float()}, grad_out)
    assert same_bits(grads["topk_weights"], wide["topk_weights"].bfloat16())


def test_second_derivatives():
    given = leaves(inputs(), TRAINED)
    out = moelora.fused_experts_lora(**given)
    match = "_backward: hidden_states requires a gradient, and a backward has none"
    with pytest.raises(RuntimeError, match=match):
        torch.autograd.grad(out, given["hidden_states"], GRAD_OUT, create_graph=True)


TRAINABLE = [p for p in floating() if p.values[4] in RECORDED.get(p.values[0], ())]


@pytest.mark.parametrize(("name", "args", "place", "index", "argument", "suffix"), TRAINABLE)
def test_tangents_and_transforms(name, args, place, index, argument, suffix):
    value = args[place] if index is None else args[place][index]

    def call(new):
        return operator(name)(*with_another(args, place, index, new))

    for grad_mode in (True, False):
        with (
            torch.set_grad_enabled(grad_mode),
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match=f"{argument}.* has a tangent, and .*forward-mode"),
        ):
            call(forward_ad.make_dual(value, torch.ones_like(value)))
    with pytest.raises(RuntimeError, match=f"{argument}.* requires a gradient, and torch.func"):
        torch.func.grad(call)(value)


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
        (lambda x: func.jvp(layer, (x,), (x,)), x),
        (func.vmap(func.grad(pack)), w),
        (func.grad(lambda w: func.vmap(pack)(w).sum()), w),
    ):
        with pytest.raises(
            RuntimeError, match=r"(hidden_states|w) (requires a gradient|has a tangent)"
        ):
            transformed(argument)
    scale = torch.ones(())
    assert torch.equal(func.grad(lambda s: s * layer(x))(scale), layer(x))
    assert torch.equal(func.jvp(lambda s: s * layer(x), (scale,), (scale,))[1], layer(x))
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        func.vmap(layer)(torch.stack([x, x]))


# ---- what happens between forward and backward ----


@pytest.mark.parametrize("name", RECORDED)
def test_arguments_that_are_written_to(name):
    """Whichever tensor it is that the backward would read."""
    args = next(args for called, args in op_calls() if called == name)
    schema = operator(name)._schema.arguments
    leaf = next(n for n, a in enumerate(schema) if a.name.endswith("lora_a"))
    writes = schema[0].alias_info is not None
    places = [n for n, value in enumerate(args) if n >= writes and n != leaf]
    places = [n for n in places if isinstance(args[n], torch.Tensor) and args[n].numel()]
    assert len(places) > 6
    for place in places:
        given = with_grad(next(a for c, a in op_calls() if c == name), leaf, 0)
        out = operator(name)(*given)
        out = given[0] if writes else out if isinstance(out, torch.Tensor) else out[0]
        with torch.no_grad():
            given[place].copy_(given[place].clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_was_saved_is_written_to():
    given = leaves(inputs(), ("w13_lora_a",))
    out, saved = moelora.fused_experts_lora_saving(**given)
    saved.gate_up.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(GRAD_OUT)


def test_an_operator_writes_to_what_another_saved():
    """Absent tensors, which all calls share, are not saved."""
    given = leaves(inputs(), ("hidden_states",))
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    out = moelora.fused_experts_lora(**{name: given[name] for name in names})
    moelora.moe_sorting(given["topk_ids"], given["topk_weights"], 4, 4)
    out.backward(GRAD_OUT)
    assert given["hidden_states"].grad.any()


@pytest.mark.parametrize("name", ["w13", "w2", "w2_lora_a"])
@pytest.mark.parametrize("offset", [0, 1])
def test_storage_that_is_freed(name, offset):
    """As sharding libraries free what they gathered, and must gather it again."""
    given = leaves(inputs(), ("hidden_states",))
    memory = torch.stack([given[name]] * 2)
    given[name] = memory[offset]
    out = moelora.fused_experts_lora(**given)
    size = memory.untyped_storage().nbytes()
    memory.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match=f"{name}.* was freed or shrunk"):
        out.backward(GRAD_OUT, retain_graph=True)
    assert given["hidden_states"].grad is None
    memory.untyped_storage().resize_(size)
    with torch.no_grad():
        memory.data.copy_(torch.stack([inputs()[name]] * 2))
    want = by_autograd(inputs(), GRAD_OUT, ("hidden_states",))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        given["hidden_states"].grad = None
        out.backward(GRAD_OUT)
    assert same_bits(given["hidden_states"].grad, want["hidden_states"])


def test_nothing_outlives_its_graph():
    given = leaves(inputs(), TRAINED)
    given["hidden_states"] = given["hidden_states"] * 1
    kept = weakref.ref(given["hidden_states"])
    out = moelora.fused_experts_lora(**given)
    del given
    assert kept() is not None
    out.backward(GRAD_OUT)
    del out
    assert kept() is None


def test_offloaded_activations():
    given = inputs()
    with torch.autograd.graph.save_on_cpu():
        found = by_autograd(given, GRAD_OUT, TRAINED)
    want = by_autograd(given, GRAD_OUT, TRAINED)
    assert_bits(want, found)


# ---- in-place operators ----


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_what_an_operator_writes_has_another_version(name):
    args = next(args for called, args in op_calls() if called == name)
    schema = operator(name)._schema.arguments
    before = [(schema[place], t, t._version) for place, _, t in tensors_in(args)]
    operator(name)(*args)
    for argument, tensor, was in before:
        assert (tensor._version > was) == bool(argument.alias_info), argument.name
