"""What the plugin meets of SGLang against the sources of its releases, without importing them.

`SGLANG_SOURCES` names a folder with one unpacked wheel for each release in it:

    pip download --no-deps sglang==0.5.23 && python -m zipfile -e sglang-0.5.23*.whl DIR/0.5.23
"""

import logging
import os
import re
from importlib import util
from pathlib import Path

import pytest
from cases import Spec
from test_sglang import SIGNATURES, make_base_layer, make_lora_backend, sglang  # noqa: F401
from vllm_sources import Sources

from moelora.integrations import sglang as plugin

FOLDER = Path(os.environ.get("SGLANG_SOURCES", Path(__file__).parents[1] / ".peers/sglang_sources"))
# Older releases have no such runner: there the plugin says so and leaves SGLang alone.
RUNNER = plugin.RUNNER.replace(".", "/") + ".py"
RELEASES = sorted(folder for folder in FOLDER.glob("*") if (folder / RUNNER).exists())
pytestmark = pytest.mark.skipif(not RELEASES, reason=f"no sources of SGLang in {FOLDER}")


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request) -> Path:
    return request.param


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters(release, path):
    """By name, in order; of a tuple its fields."""
    module, name = re.fullmatch(r"([a-z_.]+)\.([A-Z].*)", path).groups()
    found = Sources(release).parameters(f"sglang.srt.{module}", name)
    wanted = [part.split("=")[0] for part in SIGNATURES[path].strip("()").split(", ")]
    bound = name.split(".")[-1] in ("from_layer", "register")  # to the class
    assert found[bound:] == [part for part in wanted if part != "*"]


# What layer.py and __init__.py read by name, and where SGLang gives it.
READ = {
    "lora/layers.py": "_moe_lora_runner lora_backend TP_GLOBAL",
    "lora/moe/runner.py": (
        "gate_up_lora_a gate_up_lora_b down_lora_a down_lora_b token_lora_mapping "
        "routed_scaling_factor activation is_gated topk_output"
    ),
    "lora/backend/base_backend.py": "batch_info get_batch_info",
    "lora/backend/triton_v2_backend.py": "lora_ranks token_slots",
    "runtime_context.py": "LoRABatchLayout TP_GLOBAL",
    "layers/moe/fused_moe_triton/layer.py": (
        "w13_weight w2_weight dispatcher with_bias moe_runner_config "
        "should_fuse_routed_scaling_factor_in_topk"
    ),
    "layers/moe/moe_runner/base.py": (
        "activation is_gated routed_scaling_factor apply_router_weight_on_input gemm1_alpha "
        "gemm1_clamp_limit no_combine num_fused_shared_experts top_k"
    ),
    "layers/moe/token_dispatcher/standard.py": "StandardDispatcher skip_local_expert_mapping",
}


@pytest.mark.parametrize("file", READ)
def test_names(release, file):
    text = (release / "sglang/srt" / file).read_text()
    assert [word for word in READ[file].split() if not re.search(rf"\b{word}\b", text)] == []


def test_buffers_are_laid_out_as_they_are_read(release):
    """The slices of A begin the largest rank apart, whatever an adapter's own; B is scaled."""
    text = Sources(release).text("sglang.srt.lora.mem_pool")
    assert "ci * max_r:ci * max_r + lora_rank" in text
    assert "w * lora_adapter.scaling" in text


@pytest.fixture
def hook_registry(release):
    path = release / "sglang/srt/plugins/hook_registry.py"  # needs the standard library alone
    spec = util.spec_from_file_location("sglang.srt.plugins.hook_registry", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in ("HookRegistry", "HookType")}


def test_its_registry_applies_the_hooks(sglang, caplog):  # noqa: F811
    """On the stand-ins: SGLang logs a traceback and goes on where it cannot."""
    base_layer, lora_backend = make_base_layer(Spec().build()), make_lora_backend("these")
    layer = sglang.FusedMoEWithLoRA(base_layer, lora_backend, max_lora_rank=16)
    assert isinstance(layer._moe_lora_runner, plugin.MoeLoraRunner)
    assert layer._moe_lora_runner.true_ranks() == "these"
    base_layer.with_bias = True
    layer = sglang.FusedMoEWithLoRA(base_layer, lora_backend, max_lora_rank=16)
    assert layer._moe_lora_runner.run(None, None) == "SGLang's own"
    assert not [record for record in caplog.get_records("setup") if record.levelno >= logging.ERROR]
