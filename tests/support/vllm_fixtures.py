"""Fixtures of the tests of the vLLM drop-in: an engine, where it runs, and what its log says."""

import importlib.util
import logging
import sys
from dataclasses import replace

import pytest
import torch
import vllm_stand_in
import vllm_stand_in_engine
from cases import Problem, Spec
from conftest import DEVICES
from stand_in import modules
from vllm_hooks import Own
from vllm_layer import HERE, VLLM, Layer, drop, load

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
_real: dict = {}  # vLLM's own modules, once imported


def pytest_generate_tests(metafunc):
    """Run a test with releases of vLLM, and with the installed one unless its module uses the
    stand-in of an engine, whose classes differ."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "vllm" in metafunc.fixturenames and "vllm" not in [mark.args[0] for mark in marks]:
        installed = pytest.param("installed", marks=needs_vllm)
        more = [] if has_engine(metafunc.module) else [installed]
        metafunc.parametrize("vllm", ["0.26.1", "0.33.0", *more], indirect=True)


def has_engine(module):
    engines = vllm_stand_in_engine.LLM, vllm_stand_in_engine.LLMEngine
    return any(value in engines for value in vars(module).values() if isinstance(value, type))


@pytest.fixture
def vllm(request, monkeypatch):
    installed = request.param == "installed"
    drop(HERE, monkeypatch)
    drop("vllm", monkeypatch)
    stand_ins = {} if installed else modules(vllm_stand_in.contents(request.param))
    for name, module in (_real if installed else stand_ins).items():
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


@pytest.fixture
def served(vllm):
    """The engine with moelora's hooks in it."""
    return vllm.register()


@pytest.fixture
def own(vllm):
    """What vLLM's own hooks for adapters were called with, under moelora's."""
    recorded = Own(vllm)
    vllm.register()
    return recorded


@pytest.fixture(params=DEVICES)
def place(request, vllm):
    """(device, dtype) that fits the engine: an installed vLLM is only tried on the CPU here."""
    if request.param == "cpu":
        return "cpu", torch.float32
    if "vllm.v1.worker.workspace" in sys.modules:
        pytest.skip("the end-to-end benchmark covers it")
    return "cuda", torch.bfloat16


@pytest.fixture
def make_layer(served, place):
    """Makes a layer of the engine that has begun a step, and adapters unless its spec has none."""
    device, dtype = place

    def make(spec: Spec | Problem, **config) -> Layer:
        p = replace(spec, dtype=dtype).build() if isinstance(spec, Spec) else spec
        layer = Layer(served, p, device, **config)
        return layer if layer.lora is None else layer.step()

    return make


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
