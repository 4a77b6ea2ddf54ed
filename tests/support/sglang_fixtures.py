"""Fixtures of the tests of the SGLang drop-in: the engine's stand-ins, and what its log says."""

import logging
import sys

import pytest
from sglang_stand_in import HookRegistry, HookType, SGLang, contents
from stand_in import modules

import moelora.integrations.sglang as moelora_sglang


@pytest.fixture
def hook_registry(monkeypatch):
    """What the module of this name has; tests against sources have SGLang's own."""
    monkeypatch.setattr(HookRegistry, "hooks", [])
    return {"HookRegistry": HookRegistry, "HookType": HookType}


@pytest.fixture
def sglang(monkeypatch, hook_registry):
    """Stand-ins for SGLang's modules, with the plugin registered and its hooks applied."""
    found = contents(hook_registry)
    made = modules({f"sglang.srt.{place}": names for place, names in found.items()})
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    moelora_sglang._say.cache_clear()
    moelora_sglang._tell.cache_clear()
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    moelora_sglang.register()
    hook_registry["HookRegistry"].apply_hooks()
    return SGLang(**{name: value for c in found.values() for name, value in c.items()})


@pytest.fixture
def warned(caplog):
    """pytest's `caplog`, which has what our logger in SGLang's log warns of."""
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        yield caplog
