"""What the plugin meets of SGLang against the sources of its releases, without importing them.

`SGLANG_SOURCES` names a folder with one unpacked wheel for each release in it:

    pip download --no-deps sglang==0.5.23 && python -m zipfile -e sglang-0.5.23*.whl DIR/0.5.23
"""

import os
import re
from pathlib import Path

import pytest
from test_sglang import SIGNATURES
from vllm_sources import Sources

from moelora.integrations import sglang as plugin

FOLDER = Path(os.environ.get("SGLANG_SOURCES", Path(__file__).parents[1] / ".peers/sglang_sources"))
# Older releases have no such runner: there the plugin says so and leaves SGLang alone.
RELEASES = sorted(
    folder
    for folder in FOLDER.glob("*")
    if any(
        (folder / runner.replace(".", "/")).with_suffix(".py").exists() for runner in plugin.RUNNERS
    )
)
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
    "lora/utils.py": "lora_ranks",
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
