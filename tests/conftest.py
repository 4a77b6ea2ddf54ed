"""Fixtures: every test body that takes `device` runs on the CPU and, where there is one, a GPU."""

from __future__ import annotations

import gc
import os

# Workers of pytest-xdist share the cores; OpenMP reads this once, when torch is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    share = (os.cpu_count() or 1) // int(workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import pytest
import torch
from cases import DTYPES
from checks import assert_close_to_ref, guarded_empty  # noqa: F401  (for `from conftest import`)
from covering import NIGHTLY, thin

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA_DTYPES = (torch.bfloat16, torch.float16)


def on_gpu(*values, **kwargs):
    """A parameter set that needs a GPU."""
    return pytest.param(*values, marks=[pytest.mark.gpu, needs_gpu], **kwargs)


DEVICES = ["cpu", on_gpu("cuda")]
# Every device with every compute dtype that its backend has.
PLACES = [
    *(pytest.param(("cpu", d), id=f"cpu-{str(d)[6:]}") for d in DTYPES),
    *(on_gpu(("cuda", d), id=f"cuda-{str(d)[6:]}") for d in CUDA_DTYPES),
]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Tests that take `device` and `dtype`, and say of neither what it is, run in all places."""
    said = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    wanted = {"device", "dtype"}
    if wanted <= {*metafunc.fixturenames} and not any(n in names for names in said for n in wanted):
        places = [pytest.param(*p.values[0], marks=p.marks, id=p.id) for p in PLACES]
        metafunc.definition.add_marker(pytest.mark.parametrize("device, dtype", places))


@pytest.fixture
def device_and_dtype(device, dtype) -> tuple[str, torch.dtype]:
    return device, dtype


@pytest.fixture
def no_grad():
    """Tests of files that use it build no graph for gradients."""
    with torch.no_grad():
        yield


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(config, items):
    if not NIGHTLY:
        items[:], dropped = thin(items)
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish():
    """Nothing imported so far is garbage: collections leave its million objects out."""
    gc.collect()
    gc.freeze()
