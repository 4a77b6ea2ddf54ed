"""torch's own checks of every operator: schema, aliasing, shape functions, dynamic shapes."""

import pytest
import torch
from glue_cases import DEVICES, op_calls, operator

import moelora  # noqa: F401

CALLS = op_calls()
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CALLS)]


@pytest.mark.parametrize("index", range(len(CALLS)), ids=IDS)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, index):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name, args = op_calls(device, dtype)[index]
    torch.library.opcheck(operator(name), args)


def test_every_operator_is_checked():
    prefix = "moelora::"
    registered = {
        name.removeprefix(prefix)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
    }
    assert registered == {name for name, _ in CALLS}
