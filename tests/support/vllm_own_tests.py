"""Pytest plugin: what vLLM's tests of `fused_moe_lora` import, with moelora's operators in it.

vLLM itself is not imported, so that they run without a GPU.
"""

import sys
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from stand_in import modules

import moelora
from moelora.integrations.vllm.ops import fused_moe_lora

EACH = 3  # parametrizations of each test


def unused(*args, **named):
    raise AssertionError("the tests that run do not call it")


def multi_gpu_test(*, num_gpus):
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


MODULES = {
    "vllm._custom_ops": {"moe_lora_align_block_size": moelora.moe_lora_align_block_size},
    "vllm.distributed": dict.fromkeys(
        (
            "init_distributed_environment",
            "initialize_model_parallel",
            "tensor_model_parallel_all_gather",
            "tensor_model_parallel_all_reduce",
        ),
        unused,
    ),
    "vllm.distributed.parallel_state": {"get_tensor_model_parallel_world_size": unused},
    "vllm.lora.ops.triton_ops": {"fused_moe_lora": fused_moe_lora},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "vllm.utils.network_utils": {"get_open_port": unused},
    "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
    "tests.utils": {"ensure_current_vllm_config": unused, "multi_gpu_test": multi_gpu_test},
}
sys.modules.update(modules(MODULES))


@pytest.fixture
def reset_default_device():
    yield
    torch.set_default_device("cpu")


def pytest_collection_modifyitems(items):
    kept = []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        some = list(group)
        kept += some[:: max(1, len(some) // EACH)][:EACH]
    items[:] = kept
