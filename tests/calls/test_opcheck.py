"""torch's own checks of every operator: schema, aliasing, shape functions, dynamic shapes."""

import pytest
import torch
from covering import extent
from glue_cases import op_calls, operator

import moelora  # noqa: F401

CALLS = op_calls()
# Compiling each call with symbolic sizes takes most of the time; test_compile.py has layers.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
UTILS = extent(nightly=(*QUICK, "test_aot_dispatch_dynamic"), ci=QUICK)
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CALLS)]


@pytest.mark.parametrize("index", range(len(CALLS)), ids=IDS)
def test_opcheck(device, index):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name, args = op_calls(device, dtype)[index]
    torch.library.opcheck(operator(name), args, test_utils=UTILS)


def test_every_operator_is_checked():
    prefix = "moelora::"
    names = torch._C._dispatch_get_all_op_names()
    registered = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    hooks = {name for name in registered if name.startswith("vllm_")}  # once imported
    assert registered - hooks == {name for name, _ in CALLS}
