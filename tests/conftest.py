"""Fixtures: every test body that takes `device` runs on the CPU and, where there is one, a GPU."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close_to_ref, guarded_empty  # noqa: F401  (for `from conftest import`)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device(request) -> str:
    return request.param


@pytest.fixture
def supported_dtypes(device) -> tuple[torch.dtype, ...]:
    """Compute dtypes of the device's backend."""
    if device == "cuda":
        return (torch.bfloat16, torch.float16)
    return (torch.float32, torch.bfloat16, torch.float16)
