"""Fixtures of the tests of the SGLang drop-in: the engine's stand-ins, and what its log says."""

import inspect
import logging
import sys

import pytest
import sglang_stand_in
from sglang_stand_in import FusedMoEWithLoRA, HookRegistry, HookType, MoeLoraRunner
from stand_in import chosen, modules

import moelora.integrations.sglang as moelora_sglang


@pytest.fixture
def hook_registry(monkeypatch):
    """What the module of this name has; tests against sources have SGLang's own."""
    monkeypatch.setattr(HookRegistry, "hooks", [])
    return {"HookRegistry": HookRegistry, "HookType": HookType}


@pytest.fixture
def sglang(monkeypatch, hook_registry):
    """Stand-ins for SGLang's modules, with the plugin registered and its hooks applied."""
    for hooked, name in ((FusedMoEWithLoRA, "__init__"), (MoeLoraRunner, "from_layer")):
        monkeypatch.setattr(hooked, name, inspect.getattr_static(hooked, name))  # put back
    found = chosen(sglang_stand_in.PLACES, vars(sglang_stand_in))
    found["plugins.hook_registry"] = hook_registry
    made = modules({f"sglang.srt.{place}": names for place, names in found.items()})
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    moelora_sglang._say.cache_clear()
    moelora_sglang._tell.cache_clear()
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    moelora_sglang.register()
    hook_registry["HookRegistry"].apply_hooks()
    return sglang_stand_in


@pytest.fixture
def warned(caplog):
    """pytest's `caplog`, which has what our logger in SGLang's log warns of."""
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        yield caplog
