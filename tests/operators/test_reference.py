"""The reference itself: dense algebra, closed forms, and a rule that can fail.

Independent oracles of the operators are transformers' blocks and PEFT, in tests/huggingface.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import DTYPES, EDGE_CASES, Spec, random_specs
from checks import UNIT_ROUNDOFF, assert_close_to_ref, guarded_empty, naming

from moelora.reference import (
    activate,
    align_max_blocks_ref,
    fused_experts_lora_ref,
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)


def dense_layer(p):
    """The same layer by dense algebra: all experts for all tokens, with merged weights.

    Only for problems without NaN in unused places, skipped rows or expert_map.
    """
    x, who = p.hidden_states.double(), p.token_lora_mapping.long()
    scalings = p.lora_scalings.double()[who] * (who >= 0)

    def merged(w, pairs):
        deltas = torch.cat([b[who].double() @ a[who].double() for a, b in pairs], dim=2)
        return w.double() + scalings[:, None, None, None] * deltas

    w13 = merged(p.w13, zip(p.w13_lora_a, p.w13_lora_b, strict=True))
    w2 = merged(p.w2, [(p.w2_lora_a, p.w2_lora_b)])
    gate, up = torch.einsum("meij,mj->mei", w13, x).chunk(2, dim=2)
    z = torch.einsum("meki,mei->mek", w2, gate / (1 + torch.exp(-gate)) * up)
    gates = torch.zeros(z.shape[:2], dtype=torch.float64)
    gates.scatter_add_(1, p.topk_ids.long(), p.topk_weights.double())
    return torch.einsum("me,mek->mk", gates, z)


@pytest.mark.parametrize("tokens, top_k, experts", [(1, 1, 1), (6, 2, 4), (5, 3, 3)])
def test_layer_equals_dense_algebra(tokens, top_k, experts):
    sizes = {"tokens": tokens, "top_k": top_k, "experts": experts, "hidden": 20, "inter": 12}
    spec = Spec(**sizes, ranks=(8, 8), mix="all_different")
    p = spec.build()
    torch.testing.assert_close(
        fused_experts_lora_ref(**p.kwargs()), dense_layer(p), rtol=1e-12, atol=1e-12
    )


def test_layer_is_two_projections_and_an_activation():
    p = Spec(tokens=7, top_k=2, bias=True, slices=1, activation="swigluoai").build()
    gate_up = fused_moe_lora_gemm_ref(**p.gemm_kwargs("w13"))
    h = activate(gate_up, "swigluoai").flatten(0, 1)
    arguments = {**p.gemm_kwargs("w2", mul_routed_weight=True), "x": h}
    out = fused_moe_lora_gemm_ref(**arguments).sum(dim=1)
    torch.testing.assert_close(out, fused_experts_lora_ref(**p.kwargs()), rtol=1e-12, atol=1e-12)


def test_activations_by_hand():
    x = torch.tensor([[2.0, -1.0, 3.0, 0.5]], dtype=torch.float64)
    sigmoid = lambda t: 1 / (1 + torch.exp(-torch.tensor(t, dtype=torch.float64)))  # noqa: E731
    expected = [2.0 * sigmoid(2.0) * 3.0, -1.0 * sigmoid(-1.0) * 0.5]
    torch.testing.assert_close(activate(x, "silu")[0], torch.stack(expected))
    torch.testing.assert_close(activate(x, "relu2")[0].tolist(), [4.0, 0.0, 9.0, 0.25])

    gelu = 0.5 * 2.0 * (1 + torch.tanh(torch.tensor((2 / torch.pi) ** 0.5 * (2 + 0.044715 * 8))))
    torch.testing.assert_close(
        activate(x, "gelu")[0, 0].item(), gelu.item() * 3.0, rtol=1e-6, atol=0
    )

    # Columns are gate, up, gate, up: gate is clamped from above only, up from both sides.
    x = torch.tensor([[9.0, -20.0, -9.0, 8.0]], dtype=torch.float64)
    expected = [(-7 + 1) * 7 * sigmoid(1.702 * 7), (7 + 1) * -9 * sigmoid(1.702 * -9)]
    torch.testing.assert_close(activate(x, "swigluoai")[0], torch.stack(expected))

    # gate 2 and 0.5, up -1 and 40
    x = torch.tensor([[2.0, 0.5, -1.0, 40.0]], dtype=torch.float64)
    tanh = lambda t: torch.tanh(torch.tensor(t, dtype=torch.float64))  # noqa: E731
    gates = [4 * tanh(2 / 4) * sigmoid(2.0), 4 * tanh(0.5 / 4) * sigmoid(0.5)]
    expected = [gates[0] * 25 * tanh(-1 / 25), gates[1] * 25 * tanh(40 / 25)]
    torch.testing.assert_close(activate(x, "situ", 4, 25)[0], torch.stack(expected))
    torch.testing.assert_close(
        activate(x, "situ", 4)[0], torch.stack([gates[0] * -1, gates[1] * 40])
    )
    expected = [torch.tensor(1.5 * -1.0), 0.5 * sigmoid(0.5) * 1.5]  # silu(2) is above 1.5
    torch.testing.assert_close(activate(x, "swiglustep", limit=1.5)[0], torch.stack(expected))

    with pytest.raises(ValueError, match="activation is 'tanh'"):
        activate(x, "tanh")
    for number in ("alpha", "limit"):
        with pytest.raises(ValueError, match=f"activation_{number} is 2, but gelu takes none"):
            activate(x, "gelu", **{number: 2})


def test_two_slices_cover_the_columns_in_memory_order():
    """Two pairs equal one pair of twice the rank with a block-diagonal B."""
    for activation in ("silu", "swigluoai"):
        p = Spec(tokens=6, ranks=(4, 4), pass_ranks=False, activation=activation).build()
        a = torch.cat(p.w13_lora_a, dim=2)
        first, second = p.w13_lora_b
        b = torch.cat(
            (
                torch.cat((first, torch.zeros_like(first)), dim=3),
                torch.cat((torch.zeros_like(second), second), dim=3),
            ),
            dim=2,
        )
        fused = replace(p, w13_lora_a=a, w13_lora_b=b)
        torch.testing.assert_close(
            fused_experts_lora_ref(**p.kwargs()), fused_experts_lora_ref(**fused.kwargs())
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_naive_follows_the_reference(dtype):
    """Bounds the naive error absolutely: a naive version that is far off would allow anything."""
    limit = 60 * UNIT_ROUNDOFF[dtype]

    def compare(ref, naive, arguments):
        ref, naive = ref(**arguments), naive(**arguments)
        torch.testing.assert_close(naive.double(), ref, rtol=limit, atol=limit)

    for spec in (*EDGE_CASES.values(), *random_specs(150, dtypes=(dtype,))):
        with naming(spec):
            p = replace(spec, dtype=dtype).build()
            compare(fused_experts_lora_ref, naive_fused_experts_lora, p.kwargs())
            for projection, weighted in product(("w13", "w2"), (False, True)):
                arguments = p.gemm_kwargs(projection, weighted)
                compare(fused_moe_lora_gemm_ref, naive_fused_moe_lora_gemm, arguments)


def test_skipped_rows_and_base_rows():
    p = Spec(routing="all_skipped", bias=True).build()
    assert not fused_experts_lora_ref(**p.kwargs()).any()
    assert not fused_moe_lora_gemm_ref(**p.gemm_kwargs("w13")).any()

    for mix, ranks in (("disabled", (8, 4)), ("out_of_range", (8, 4)), ("all_different", (0, 8))):
        p = Spec(mix=mix, ranks=ranks, tokens=16).build()
        mapping = p.token_lora_mapping.tolist()
        active = [0 <= a < 2 and ranks[a] > 0 for a in mapping]
        if p.adapter_enabled is not None:
            active = [on and bool(p.adapter_enabled[a]) for on, a in zip(active, mapping)]  # noqa: B905
        with_lora = fused_experts_lora_ref(**p.kwargs())
        base = fused_experts_lora_ref(**p.base().kwargs())
        changed = (with_lora != base).any(dim=1)
        assert changed.tolist() == active
        assert any(active)
        assert not all(active)


MUTATIONS = {
    "scaling forgotten": lambda p: replace(p, lora_scalings=None),
    "adapter off by one": lambda p: replace(p, token_lora_mapping=p.token_lora_mapping ^ 1),
    "rank cut by one": lambda p: replace(p, lora_ranks=p.lora_ranks - 1),
    "experts swapped": lambda p: replace(p, topk_ids=p.topk_ids ^ 1),
    "weights swapped": lambda p: replace(p, topk_weights=p.topk_weights.flip(1)),
    "one element of x": lambda p: replace(p, hidden_states=one_changed(p.hidden_states)),
    "one element of w2": lambda p: replace(p, w2=one_changed(p.w2)),
    "bias of w2 forgotten": lambda p: replace(p, w2_bias=None),
    "gate and up swapped": lambda p: replace(p, w13=p.w13.roll(p.w13.size(1) // 2, 1)),
    "slices swapped": lambda p: replace(p, w13_lora_a=p.w13_lora_a[::-1]),
    "another activation": lambda p: replace(p, spec=replace(p.spec, activation="gelu")),
    "w2 delta forgotten": lambda p: replace(p, w2_lora_a=None, w2_lora_b=None),
}


def one_changed(t):
    t = t.clone()
    t[0].view(-1)[3] += 1
    return t


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_pass_rule_notices(mutation, dtype):
    """The rule accepts an accurate result and rejects one with a small mistake in it."""
    p = Spec(tokens=8, bias=True, mix="all_different", dtype=dtype, ranks=(4, 4), seed=3).build()
    p.topk_ids[0, 0] = 0
    p.lora_scalings = torch.tensor([0.5, 2.0])
    ref = fused_experts_lora_ref(**p.kwargs())
    naive = naive_fused_experts_lora(**p.kwargs())
    assert assert_close_to_ref(ref.to(dtype), ref, naive, dtype) <= 1
    wrong = fused_experts_lora_ref(**MUTATIONS[mutation](p).kwargs()).to(dtype)
    with pytest.raises(AssertionError, match="error .* > |outside the fence"):
        assert_close_to_ref(wrong, ref, naive, dtype)


def test_pass_rule_rejects_nan_dtype_and_shape():
    ref = torch.zeros(2, 3, dtype=torch.float64)
    y = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match="dtype"):
        assert_close_to_ref(y.bfloat16(), ref, y, torch.float32)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_ref(y[:1], ref, y, torch.float32)
    y[1, 2] = float("nan")
    with pytest.raises(AssertionError, match=r"not finite; 1 of 6 elements, first at \(1, 2\)"):
        assert_close_to_ref(y, ref, ref, torch.float32)


def test_guard_bands_notice_a_write():
    guarded = guarded_empty((3, 5), torch.bfloat16)
    assert guarded.tensor.isnan().all()
    guarded.tensor.zero_()
    guarded.check()
    for byte in (4095, 4096 + 30):
        guarded.memory[byte] = 0
        with pytest.raises(AssertionError, match="1 bytes (before|after) out were overwritten"):
            guarded.check("out")
        guarded.memory[byte] = 0xA5


@pytest.mark.parametrize("mode", ["base", "uniform", "segmented", "sorting"])
def test_max_blocks_is_reached_but_never_passed(mode):
    """Over all ways to give 6 rows to 2 experts and 2 adapter slots (one of them a base row)."""
    for block_size in (1, 2, 3, 4, 8):
        for num_rows in range(7):
            most = 0
            for code in range(4**num_rows):
                keys = [(code >> (2 * i) & 1, code >> (2 * i + 1) & 1) for i in range(num_rows)]
                if mode in ("base", "segmented", "sorting"):
                    keys = [e for e, _ in keys]
                blocks = sum(-(-keys.count(key) // block_size) for key in set(keys))
                if mode == "sorting":
                    blocks += 2 - len(set(keys))
                most = max(most, blocks)
            bound = align_max_blocks_ref(mode, num_rows, 2, block_size, max_loras=1)
            assert bound >= most
            # The bound ignores that rows come whole: one block over at most, or two in `sorting`.
            assert bound <= most + 1 + (mode == "sorting")
