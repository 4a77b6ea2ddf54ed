"""Pytest plugin: vLLM's own tests with moelora in place of what they test, unless MOELORA_VLLM=0.

`python -m benchmarks.vllm_suite` runs them with it. `SUITE_EACH=n` keeps n parametrizations of each
test, evenly spaced.
"""

import os
import sys
import types
from itertools import groupby

import pytest

from moelora.integrations.vllm import SWITCH

ALL = "1000000"


def pytest_configure(config):
    # Clients of servers, which these tests do not start, and what a fixture shuts down.
    for name in ("anthropic", "openai", "ray"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].shutdown = lambda: None
    if os.environ.get(SWITCH) == "0":
        return
    from vllm.lora.ops import triton_ops
    from vllm.plugins import load_general_plugins

    from moelora.integrations.vllm import ops

    load_general_plugins()
    triton_ops.fused_moe_lora = ops.fused_moe_lora


def pytest_collection_modifyitems(items):
    kept, most = [], int(os.environ.get("SUITE_EACH", ALL))
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        some = list(group)
        kept += [some[i * len(some) // most] for i in range(most)] if len(some) > most else some
    items[:] = kept


def pytest_sessionfinish(session, exitstatus):
    """Failures are judged by comparison: they are no error."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture
def default_vllm_config():
    """As in vLLM's tests/conftest.py, which imports much more."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
