"""Fixtures of the tests of the vLLM drop-in: an engine, where it runs, and what its log says."""

import importlib.util
import logging
import sys

import pytest
import torch
import vllm_stand_in
from conftest import needs_gpu
from vllm_layer import HERE, VLLM, drop, load

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
_real: dict = {}  # vLLM's own modules, once imported


@pytest.fixture(params=["0.26.1", "0.33.0", pytest.param("installed", marks=needs_vllm)])
def vllm(request, monkeypatch):
    installed = request.param == "installed"
    drop(HERE, monkeypatch)
    drop("vllm", monkeypatch)
    for name, module in (_real if installed else vllm_stand_in.modules(request.param)).items():
        monkeypatch.setitem(sys.modules, name, module)
    try:
        engine = VLLM(monkeypatch)
    except ImportError as error:
        pytest.skip(f"vLLM cannot be imported here: {error}")
    if installed:
        workspace = load("vllm.v1.worker.workspace")
        monkeypatch.setattr(workspace, "_manager", None)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        workspace.init_workspace_manager(torch.device("cpu"))
        _real.update((n, m) for n, m in sys.modules.items() if n.split(".")[0] == "vllm")
    return engine


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def place(request, vllm):
    """(device, dtype) that fits the engine: an installed vLLM is only tried on the CPU here."""
    if request.param == "cpu":
        return "cpu", torch.float32
    if "vllm.v1.worker.workspace" in sys.modules:
        pytest.skip("the end-to-end benchmark covers it")
    return "cuda", torch.bfloat16


@pytest.fixture
def lines():
    """What our logger in vLLM's log has said so far."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("vllm.moelora")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
