"""Every tensor argument of every public operator: what is no usable tensor is refused by name.

None of it reaches torch's own functions, which would say nothing of the argument, or read address 0
of a tensor whose storage was freed. Wrong sizes and numbers are in test_errors.py.
"""

import copy
import inspect
import re
import types

import pytest
import torch
from checks import freed
from glue_cases import LORAS, VLLM, E, I, K, R, inputs, public_calls

import moelora
from moelora.integrations.batched import batched_experts_lora
from moelora.integrations.sglang import experts_with_lora
from moelora.training import touched_pairs

ADDED = {"batched_experts_lora", "experts_with_lora", "touched_pairs"}
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


@pytest.fixture
def calls():
    """(function, valid arguments) by name."""
    given, table = inputs(), torch.arange(E, dtype=torch.int32)
    batch = types.SimpleNamespace(
        token_lora_mapping=given["token_lora_mapping"],
        gate_up_lora_a=zeros(LORAS, E, 2 * R, K),
        gate_up_lora_b=zeros(LORAS, E, 2 * I, R),
        down_lora_a=given["w2_lora_a"],
        down_lora_b=given["w2_lora_b"],
    )
    return public_calls() | {
        "batched_experts_lora": (
            batched_experts_lora,
            {
                "hidden_states": zeros(E, 3, K),
                "out": zeros(E, 3, K),
                **{name: given[name] for name in ("w13", "w2")},
                "expert_num_tokens": torch.ones(E, dtype=torch.int32),
                "token_lora_mapping": zeros(E, 3, dtype=torch.int32),
            },
        ),
        "experts_with_lora": (
            experts_with_lora,
            {
                **{name: given[name] for name in ("hidden_states", "topk_weights", "topk_ids")},
                "w13_weight": given["w13"],
                "w2_weight": given["w2"],
                "batch": batch,
                "routed_scaling_factor": 2.0,
            },
        ),
        "touched_pairs": (
            touched_pairs,
            {
                **{name: given[name] for name in ("topk_ids", "token_lora_mapping")},
                "max_loras": LORAS,
                "num_experts": E,
                "expert_map": table,
            },
        ),
    }


def test_every_operator_is_here(calls):
    operators = {name for name in moelora.__all__ if inspect.isfunction(getattr(moelora, name))}
    assert {name.split()[0] for name in calls} == (operators - NO_TENSORS) | ADDED


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
