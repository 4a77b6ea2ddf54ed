"""What the backward of a layer, of a projection and of deltas refuses, by name."""

import pytest
import torch
from backward_cases import KINDS, LAYER, SPARSE, each
from checks import freed
from test_backwards import SPEC

import moelora
from moelora import ProjectionGradients
from moelora.operators.sparse import set_sparse
from moelora.training import touched_pairs

PLACE = ("cpu", torch.bfloat16)


@each(KINDS)
def test_refusals(operator):
    arguments, grad_out = operator.problem(SPEC, PLACE)
    x, (*_, name_a, name_b) = operator.x, operator.factors
    a, b = arguments[name_a], arguments[name_b]

    def refuse(match, error=ValueError, grad_out=grad_out, grads=None, **options):
        if grads is not None:
            options["grads"] = operator.gradients(**grads)
        with pytest.raises(error, match=match):
            operator.backward(arguments, grad_out, **options)

    refuse(rf"grad_out has {grad_out.dim() - 1} dimensions", grad_out=grad_out[0])
    refuse("grad_out has dtype float32, expected bfloat16", grad_out=grad_out.float())
    refuse(r"grad_out.size\(\d\) is 3", grad_out=grad_out[..., :3])
    refuse(r"wanted has \['w'\]", wanted=["w"])
    refuse("wanted is 'x', expected a collection", wanted="x")
    refuse("wanted is an int, expected a collection of str or None", TypeError, wanted=3)
    refuse("pass one", wanted=[x], grads={})
    refuse("grads holds", accumulate=True)
    refuse("pairs has the indices of gradients in grads", pairs=torch.zeros(2, 4).int())
    narrow = torch.zeros(*a.shape[:3], 3)
    refuse(rf"grad_{name_a}.*size\(3\) is 3", grads={name_a: narrow})
    refuse(f"grad_{name_b}.* has dtype float16", grads={name_b: torch.zeros_like(b).half()})
    refuse("shares memory", grads={name_a: a})
    refuse("shares memory", grads={x: arguments[x]})
    refuse("shares memory|grads.x has shape", grads={x: grad_out})
    slices = operator.factors[0]
    refuse(rf"grad_{slices} has 3 slices", grads={slices: [torch.zeros_like(a)] * 3})
    pairs = torch.zeros(a.size(0), a.size(1), dtype=torch.int32)
    sparse = {name_a: torch.zeros(1, *a.shape[2:]), name_b: torch.zeros(1, *b.shape[2:])}
    refuse("grad_pairs.*expected int32", grads=sparse, pairs=pairs.long())
    refuse("size", grads=sparse, pairs=pairs[:, 1:])
    refuse(r"pairs has shape \(0,\), expected \(max_loras, E\)", grads=sparse, pairs=pairs[0, :0])
    fewer, thinner = sparse[name_b][1:], sparse[name_b][:, 1:]
    refuse("number of sparse gradients", grads=sparse | {name_b: fewer}, pairs=pairs)
    refuse("size", grads=sparse | {name_b: thinner}, pairs=pairs)


@each(KINDS[1:])
def test_refusals_of_arguments(operator):
    arguments, grad_out = operator.problem(SPEC, PLACE)
    leaf = arguments["x"].detach().requires_grad_()
    into = ProjectionGradients(lora_a=torch.zeros_like(arguments["lora_a"]))
    other = ProjectionGradients(x=arguments["x"].new_zeros(1, *arguments["x"].shape))
    for given, options, error, why in (
        (arguments, {"act": 1}, TypeError, "unexpected keyword argument 'act'"),
        (arguments, {"grads": other}, ValueError, r"grads.x has shape \(1, "),
        (arguments | {"x": leaf}, {}, RuntimeError, "x requires a gradient, and a backward has no"),
        (arguments | {"x": leaf}, {"grads": into}, RuntimeError, r"of its own: .* torch\.no_grad"),
    ):
        with pytest.raises(error, match=why):
            operator.backward(given, grad_out, **options)
    if operator.kind == "delta":
        without = {n: v for n, v in arguments.items() if n != "lora_b"}
        with pytest.raises(TypeError, match="missing a required argument: 'lora_b'"):
            operator.backward(without, grad_out)


def test_refusals_of_a_layer():
    arguments, grad_out = LAYER.problem(SPEC, PLACE)
    _, saved = moelora.fused_experts_lora_saving(**arguments)
    shared, G = torch.zeros_like(arguments["w2_lora_a"]), moelora.Gradients
    bias = arguments["w13_bias"]
    both = G(w2_lora_a=shared, w13_bias=shared.flatten()[: bias.numel()].view(bias.shape))
    of_none = {"w13_bias": None}, G(w13_bias=torch.zeros_like(bias))
    for changes, own, grads, why in (
        ({}, {"gate_up": saved.gate_up[:4]}, None, r"gate_up.size\(0\) is 4"),
        ({}, {"w13_shrink": torch.empty(0)}, None, "w13_shrink is absent"),
        ({}, {"w2_shrink": saved.w2_shrink[:, 1:]}, None, r"w2_shrink.size\(1\) is"),
        ({}, {}, G(w2_bias=torch.zeros(4, 3)), r"grad_w2_bias.size\(1\) is 3"),
        ({}, {}, both, "shares memory"),
        (of_none[0], {}, of_none[1], "grad_w13_bias is given, but w13_bias is absent"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora.fused_experts_lora_backward(
                grad_out, saved._replace(**own), **arguments | changes, grads=grads
            )


# ---- pairs of expert and adapter that tokens reach ----


def test_touched_pairs_of_other_shapes_are_refused():
    ids, mapping = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for arguments, why in (
        ((ids[:, 0], mapping, 2, 4), r"topk_ids has shape \(3,\), expected \(M, top_k\)"),
        ((ids.float(), mapping, 2, 4), "topk_ids has dtype float32, expected an integer one"),
        ((ids, mapping[:, None], 2, 4), r"mapping has shape \(3, 1\), expected \(3,\)"),
        ((ids, mapping[:1], 2, 4), r"mapping has shape \(1,\), expected \(3,\)"),
        ((ids, mapping, -1, 4), "max_loras is -1, wanted an integer >= 0"),
        ((ids, mapping, 2, -4), "num_experts is -4, wanted an integer >= 0"),
        ((ids, mapping, float("nan"), 4), "max_loras is nan, wanted an integer >= 0"),
        ((ids, mapping, 2, True), "num_experts is True, wanted an integer >= 0"),
        ((ids, mapping.to("meta"), 2, 4), "token_lora_mapping is on meta, expected cpu as topk_i"),
        ((ids, mapping, 2**16, 2**15), "num_experts is 32768, expected at most 2.31 - 1 pairs"),
        ((ids, mapping, 2, 4, ids), r"expert_map has shape \(3, 2\), expected 1 dimension"),
        ((freed(ids), mapping, 2, 4), "topk_ids has elements up to byte 48 of a storage of 0"),
        ((ids, freed(mapping), 2, 4), "token_lora_mapping has elements up to byte 12"),
    ):
        with pytest.raises(ValueError, match=why):
            touched_pairs(*arguments)
    whole = torch.empty(0, dtype=torch.int32)  # as operators have it: no map
    assert touched_pairs(ids, mapping, 2, 4, whole)[0].tolist() == [[0, -1, -1, -1], [-1] * 4]


def test_pairs_of_a_call_that_is_refused():
    """The operator's own message, where torch would broadcast or read address 0."""
    arguments = SPARSE.build().kwargs()
    factors = {name: arguments[name].requires_grad_() for name in ("w2_lora_a", "w2_lora_b")}
    set_sparse(factors.values(), True)
    ids, mapping = arguments["topk_ids"], arguments["token_lora_mapping"]
    for changes, why in (
        ({"topk_ids": freed(ids)}, "topk_ids has elements up to byte"),
        ({"token_lora_mapping": freed(mapping)}, "token_lora_mapping has elements up to byte"),
        ({"token_lora_mapping": mapping[:5]}, "token_lora_mapping.size"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora.fused_experts_lora(**arguments | changes)
