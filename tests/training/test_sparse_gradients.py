"""Gradients of the pairs of expert and adapter that tokens reach, and of no others."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from gradient_cases import FEW_PLACES, grad_like

import moelora
from moelora.operators.sparse import set_sparse
from moelora.training import touched_pairs

SPEC = Spec(tokens=9, top_k=2, experts=5, hidden=72, inter=40, ranks=(8, 3, 16), mix="many")
SPECS = {
    "per_expert": SPEC,
    "outer": replace(SPEC, sharing="outer", slices=1),
    "remote": replace(SPEC, remote=2, routing="out_of_range"),
    "long": replace(SPEC, tokens=40, experts=2),
    "no_rows": replace(SPEC, tokens=0),
}
FACTORS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
NOTHING = 7.0  # what is not written


def setting(name, place):
    """Arguments, gradient of the output, what the forward saved, dense gradients, pairs, count."""
    p = replace(SPECS[name], dtype=place[1]).build().to(place[0])
    arguments = p.kwargs()
    out, saved = moelora.fused_experts_lora_saving(**arguments)
    grad_out = grad_like(out.shape, place[1], place[0])
    dense = moelora.fused_experts_lora_backward(grad_out, saved, wanted=FACTORS, **arguments)
    loras, experts = arguments["w2_lora_b"].shape[0], p.w13.shape[0]
    pairs, count = touched_pairs(
        p.topk_ids, p.token_lora_mapping, loras, experts, arguments.get("expert_map")
    )
    return arguments, grad_out, saved, dense, pairs, int(count)


def is_sparse(grad, pairs):
    return grad.shape[1] == pairs.shape[1]


def each(value):
    return value if isinstance(value, list) else [value]


def buffers(dense, pairs, count, dtype=None):
    """Gradients to write to, of the pairs alone where experts have factors of their own."""

    def buffer(grad):
        shape = (count, *grad.shape[2:]) if is_sparse(grad, pairs) else grad.shape
        return torch.full(shape, NOTHING, dtype=dtype or grad.dtype, device=grad.device)

    made = {
        name: [buffer(g) for g in grad] if isinstance(grad, list) else buffer(grad)
        for name, grad in dense._asdict().items()
        if name in FACTORS
    }
    return moelora.Gradients(**made)


def freed(ids):
    ids = ids.clone()
    ids.untyped_storage().resize_(0)
    return ids


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_touched_pairs_have_the_bits_of_dense_gradients(name, place):
    arguments, grad_out, saved, dense, pairs, count = setting(name, place)
    assert count == (pairs >= 0).sum() == pairs.max() + 1
    given = buffers(dense, pairs, count + 1)
    found = moelora.fused_experts_lora_backward(
        grad_out, saved, grads=given, pairs=pairs, **arguments
    )
    touched = pairs >= 0
    for factor in FACTORS:
        for got, want in zip(
            each(getattr(found, factor)), each(getattr(dense, factor)), strict=True
        ):
            if is_sparse(want, pairs):
                assert same_bits(got[:count], want[touched]), factor
                assert not want[~touched].any(), f"{factor}: a pair that tokens reach is missing"
                assert (got[count:] == NOTHING).all(), f"{factor}: written without a pair"
            else:
                assert same_bits(got, want), factor


@pytest.mark.parametrize("place", FEW_PLACES)
def test_any_order_and_any_part_of_the_pairs(place):
    arguments, grad_out, saved, dense, pairs, count = setting("per_expert", place)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(pairs)
    untouched = (pairs < 0).nonzero()[0].tolist()
    some = torch.where(pairs >= 0, order[pairs.long()], -1).int()
    some[some == 1] = 1000  # out of range: not wanted
    some[tuple(untouched)] = 1
    found = moelora.fused_experts_lora_backward(
        grad_out, saved, grads=buffers(dense, pairs, count), pairs=some, **arguments
    )
    for factor in FACTORS:
        for got, want in zip(
            each(getattr(found, factor)), each(getattr(dense, factor)), strict=True
        ):
            for l, e in (pairs >= 0).nonzero().tolist():
                if some[l, e] < count:
                    assert same_bits(got[some[l, e]], want[l, e])
            assert not got[1].any(), "a pair without tokens has zeros"


@pytest.mark.parametrize("place", FEW_PLACES)
def test_sparse_gradients_accumulate(place):
    arguments, grad_out, saved, dense, pairs, count = setting("long", place)
    given = buffers(dense, pairs, count, torch.float32)
    moelora.fused_experts_lora_backward(grad_out, saved, grads=given, pairs=pairs, **arguments)
    once = [g.clone() for factor in FACTORS for g in each(getattr(given, factor))]
    moelora.fused_experts_lora_backward(
        grad_out, saved, grads=given, pairs=pairs, accumulate=True, **arguments
    )
    twice = [g for factor in FACTORS for g in each(getattr(given, factor))]
    assert all(torch.equal(b, 2 * a) for a, b in zip(once, twice, strict=True))


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


def test_what_is_refused():
    arguments, grad_out, saved, dense, pairs, count = setting("per_expert", ("cpu", torch.float32))

    fitting = buffers(dense, pairs, count)

    def refuse(message, given=fitting, pairs=pairs):
        with pytest.raises(ValueError, match=message):
            moelora.fused_experts_lora_backward(
                grad_out, saved, grads=given, pairs=pairs, **arguments
            )

    refuse("grad_pairs.*expected int32", pairs=pairs.long())
    refuse("size", pairs=pairs[:, 1:])
    refuse(r"pairs has shape \(5,\), expected \(max_loras, E\)", pairs=pairs[0])
    refuse("number of sparse gradients", fitting._replace(w2_lora_b=fitting.w2_lora_b[1:]))
    refuse("size", fitting._replace(w2_lora_b=fitting.w2_lora_b[:, 1:]))
    with pytest.raises(ValueError, match="pairs has the indices of gradients in grads"):
        moelora.fused_experts_lora_backward(grad_out, saved, pairs=pairs, **arguments)


def test_pairs_of_a_call_that_is_refused():
    """The operator's own message, where torch would broadcast or read address 0."""
    arguments = SPEC.build().kwargs()
    factors = {name: arguments[name].requires_grad_() for name in ("w2_lora_a", "w2_lora_b")}
    set_sparse(factors.values(), True)
    for changes, why in (
        ({"topk_ids": freed(arguments["topk_ids"])}, "topk_ids has elements up to byte"),
        (
            {"token_lora_mapping": freed(arguments["token_lora_mapping"])},
            "token_lora_mapping has elements up to byte",
        ),
        ({"token_lora_mapping": arguments["token_lora_mapping"][:5]}, "token_lora_mapping.size"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora.fused_experts_lora(**arguments | changes)
