"""Every tensor argument of every public operator: what is no usable tensor is refused by name.

None of it reaches torch's own functions, which would say nothing of the argument, or read address 0
of a tensor whose storage was freed. Wrong sizes and numbers are in test_errors.py.
"""

import copy
import inspect
import re
import types
from dataclasses import replace

import pytest
import torch
from cases import Spec
from checks import freed
from delta_cases import PLAIN, Lists, base_output, columns_of, delta_kwargs
from glue_cases import LORAS, TOP_K, E, I, K, M, R, inputs

import moelora
from moelora.integrations.batched import batched_experts_lora
from moelora.integrations.sglang import experts_with_lora
from moelora.training import touched_pairs

ADDED = {
    "batched_experts_lora": batched_experts_lora,
    "experts_with_lora": experts_with_lora,
    "touched_pairs": touched_pairs,
}
NO_TENSORS = {"run_moe_lora"}  # calls moe_lora_fused, whose names its errors have


# What is given instead of a tensor. Of one that is not contiguous torch makes a copy to reshape it.
INSTEAD = {
    "a list": lambda t: [1, 2],
    "an array": lambda t: t.numpy(),
    "no number": lambda t: object(),
    "on another device": lambda t: t.to("meta"),
    "without dimensions": lambda t: t.new_zeros(()),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([zeros(2), zeros(3)]),
    "complex": lambda t: t.to(torch.complex64),
    "freed": freed,
    "freed, columns first": lambda t: freed(t.mT.contiguous().mT) if t.dim() > 1 else None,
    "freed, of another dtype": lambda t: freed(t.double()),
}
VLLM = ("fused_moe_lora", "fused_moe_lora_shrink", "fused_moe_lora_expand")
ACCEPTED = {
    "without dimensions": {
        *((f"{name}{form}", "num_active_loras") for name in VLLM for form in ("", " naive")),
        *((f"{name} naive", "lora_ids") for name in VLLM),
    },
    "on another device": {("prepack_weights", "w")},
}
UNREAD = {(name, "token_lora_mapping") for name in VLLM}
UNREAD |= {("fused_moe_lora_gemm_backward", "topk_weights")}


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def vllm_calls():
    """Of vLLM's operators, in both forms."""
    p = replace(PLAIN, dtype=torch.float32).build()
    for form, naive in (("", False), (" naive", True)):
        lists = Lists(p, "w13", naive)
        out, rank = base_output(p, columns_of(p, "w13")).tensor, lists.a[0].size(2)
        h = zeros(len(lists.a), *p.topk_ids.shape, rank)
        halves = lists.of_shrink(h, lists.a), lists.of_expand(out, h, lists.b)
        for name, of in zip(VLLM, (lists.of_fused(out), *halves), strict=True):
            yield name + form, (getattr(moelora, name), of | {"num_experts": lists.num_experts})


@pytest.fixture
def calls():
    """(function, valid arguments) by name."""
    given, spec = inputs(), Spec().build()
    one_expert = delta_kwargs(spec, "w13")
    one_expert |= {k: [t[:, :1] for t in one_expert[k]] for k in ("lora_a", "lora_b")}
    one_expert |= {"num_experts": None, "expert_map": None}
    routing = {"topk_ids": given["topk_ids"], "num_experts": E, "block_size": 4}
    ids = {"expert_ids": given["topk_ids"], "weight_indices": given["token_lora_mapping"]}
    ids |= {"lora_ranks": given["lora_ranks"], "adapter_enabled": given["adapter_enabled"]}
    weighted = {"routing_weights": given["topk_weights"], "scalings": given["lora_scalings"]}
    a13, b13 = zeros(LORAS, E, R, K), zeros(LORAS, E, 2 * I, R)
    a2, b2 = given["w2_lora_a"], given["w2_lora_b"]
    h, activated = zeros(M, TOP_K, R), zeros(M, TOP_K, I)
    combined = {"output": zeros(M, K), "down_a": a2, "down_b": b2, **ids, **weighted}
    batch = types.SimpleNamespace(
        token_lora_mapping=given["token_lora_mapping"],
        gate_up_lora_a=zeros(LORAS, E, 2 * R, K),
        gate_up_lora_b=b13,
        down_lora_a=a2,
        down_lora_b=b2,
    )
    out, saved = moelora.fused_experts_lora_saving(**given)
    gemm = spec.gemm_kwargs()
    delta, mixed = delta_kwargs(spec, "w13"), {k: given[k] for k in ("w13", "w2")}
    grad = {"grad_out": zeros(*moelora.fused_moe_lora_gemm(**gemm).shape)}
    grad_delta = {"grad_out": zeros(*moelora.moe_lora_gate_up_delta(**delta).shape)}
    align = {**routing, "token_lora_mapping": given["token_lora_mapping"], "max_loras": LORAS}
    lists = {
        "sorted_token_ids": zeros(LORAS, 24, dtype=torch.int32),
        "expert_ids": zeros(LORAS, 6, dtype=torch.int32),
        "num_tokens_post_pad": zeros(LORAS, dtype=torch.int32),
        "lora_ids": torch.arange(LORAS, dtype=torch.int32),
    }
    plain = {
        "fused_experts_lora": {**given, "out": zeros(M, K)},
        "fused_experts_lora_saving": given,
        "fused_experts_lora_backward": {"grad_out": out, "saved": saved, **given},
        "fused_moe_lora_gemm": gemm,
        "fused_moe_lora_gemm_backward": grad | gemm,
        "moe_lora_gate_up_delta": delta,
        "moe_lora_gate_up_delta of one": one_expert,
        "moe_lora_down_delta": delta_kwargs(spec, "w2"),
        "moe_lora_delta_backward": grad_delta | delta,
        "moe_align_block_size": {**routing, "expert_map": torch.arange(E, dtype=torch.int32)},
        "moe_lora_align_block_size": {**align, "adapter_enabled": given["adapter_enabled"]},
        "moe_lora_align_block_size of vllm": align | lists,
        "moe_sorting": {**routing, "topk_weights": given["topk_weights"]},
        "prepack_weights": {"w": given["w13"]},
        "moe_lora_a": {"x": zeros(M, K), "lora_a": a13, "out": h, **ids},
        "moe_lora_gate_up_b": {"intermediate_a": h, "gate_up_b": b13, "out": activated, **ids},
        "moe_lora_down_combine": {"activated": activated, **combined},
        "moe_lora_fused": {"x": zeros(M, K), "gate_up_a": a13, "gate_up_b": b13, **combined},
        "batched_experts_lora": {
            "hidden_states": zeros(E, 3, K),
            "out": zeros(E, 3, K),
            **mixed,
            "expert_num_tokens": torch.ones(E, dtype=torch.int32),
            "token_lora_mapping": zeros(E, 3, dtype=torch.int32),
        },
        "experts_with_lora": {
            **{name: given[name] for name in ("hidden_states", "topk_weights", "topk_ids")},
            "w13_weight": given["w13"],
            "w2_weight": given["w2"],
            "batch": batch,
            "routed_scaling_factor": 2.0,
        },
        "touched_pairs": {
            **{name: given[name] for name in ("topk_ids", "token_lora_mapping")},
            "max_loras": LORAS,
            "num_experts": E,
            "expert_map": torch.arange(E),
        },
    }
    found = {
        name: (ADDED.get(name) or getattr(moelora, name.split()[0]), arguments)
        for name, arguments in plain.items()
    }
    return found | dict(vllm_calls())


def test_every_operator_is_here(calls):
    operators = {name for name in moelora.__all__ if inspect.isfunction(getattr(moelora, name))}
    assert {name.split()[0] for name in calls} == (operators - NO_TENSORS) | set(ADDED)


def with_one_replaced(value, make):
    """The value with its first tensor, or itself, replaced; None if there is none to replace."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if type(value) in (list, tuple) and value and isinstance(value[0], torch.Tensor):
        other = make(value[0])
        return None if other is None else [other, *value[1:]]
    return None


@pytest.mark.parametrize("kind", INSTEAD)
def test_what_is_no_usable_tensor_is_refused_by_name(kind, calls):
    accepted = set()
    for name, (function, arguments) in calls.items():
        function(**copy.deepcopy(arguments))
        for argument, value in arguments.items():
            other = with_one_replaced(value, INSTEAD[kind])
            if other is None or (name, argument) in UNREAD:
                continue
            try:
                function(**{**copy.deepcopy(arguments), argument: other})
            except (TypeError, ValueError) as error:
                own = rf"\b{argument.removesuffix('_weight')}(_weight)?\b"
                said = re.search(own, str(error))
                assert said, f"{name}: {argument} {kind}: {error!r}"
            else:
                accepted.add((name, argument))
    assert accepted == ACCEPTED.get(kind, set())


def test_a_tensor_that_is_missing_is_missed_by_name(calls):
    for name, (function, arguments) in calls.items():
        for argument, value in arguments.items():
            wanted = inspect.signature(function).parameters[argument].annotation
            is_optional = not isinstance(value, torch.Tensor) or "None" in str(wanted)
            if is_optional or (name, argument) in UNREAD:
                continue
            with pytest.raises(TypeError, match=rf"{argument} is None, expected Tensor"):
                function(**{**arguments, argument: None})
                pytest.fail(f"{name}: {argument}")
