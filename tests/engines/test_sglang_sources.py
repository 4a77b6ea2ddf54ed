"""What the plugin meets of SGLang against the sources of its releases, without importing them.

`SGLANG_SOURCES` names a folder with one unpacked wheel for each release in it:

    pip download --no-deps sglang==0.5.23 && python -m zipfile -e sglang-0.5.23*.whl DIR/0.5.23
"""

import ast
import logging
import os
import re
from collections.abc import Iterable
from importlib import util
from pathlib import Path
from typing import Union

import pytest
from cases import Spec
from sglang_stand_in import OWN, make_base_layer, runner_of
from test_sglang import SIGNATURES
from vllm_sources import Sources

from benchmarks.serving.sglang_adapters import HOOKED
from moelora.adapters import engine_rules
from moelora.integrations import sglang as plugin
from moelora.integrations.sglang import interface

pytest_plugins = ["sglang_fixtures"]

FOLDER = Path(os.environ.get("SGLANG_SOURCES", Path(__file__).parents[2] / ".peers/sglang_sources"))
RUNNER = (
    interface.RUNNER.replace(".", "/") + ".py"
)  # of triton_v2, which releases before 0.5.23 lack
REGISTRY = "sglang/srt/plugins/hook_registry.py"
RELEASES = sorted(
    folder
    for folder in FOLDER.glob("*")
    if (info := folder / "sglang/srt/lora/lora_moe_runners.py").exists()
    and "has_active_lora" in info.read_text()  # since 0.5.13, which the plugin needs
)
pytestmark = pytest.mark.skipif(not RELEASES, reason=f"no sources of SGLang in {FOLDER}")


def only_where_there_is_triton_v2(release):
    if not (release / RUNNER).exists():
        pytest.skip("legacy backends alone")


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request) -> Path:
    return request.param


@pytest.fixture
def triton_v2(release) -> Path:
    only_where_there_is_triton_v2(release)
    return release


TARGETS = ["model.layers.0.mlp.gate_proj", "q_proj", "unembed_tokens", "kv_a_proj_with_mqa", "gate"]


def test_names_are_read_as_sglang_reads_them(triton_v2):
    """By `moelora doctor --lora`, whose rules are those of the releases with triton_v2."""
    name, needed = "get_normalized_target_modules", {"Union": Union, "Iterable": Iterable}
    (normalized,) = Sources(triton_v2).functions("sglang.srt.lora.utils", name, **needed)
    for one in [*engine_rules._NORMALIZED, *TARGETS]:
        assert engine_rules._targets({"target_modules": [one]}) == normalized([one])
    assert normalized("all-linear") == {"all"}
    text = (triton_v2 / "sglang/srt/layers/utils/common.py").read_text()
    assert engine_rules._NUMBER.pattern in text, "of a layer"
    text = (triton_v2 / "sglang/srt/lora/mem_pool.py").read_text()
    assert engine_rules._EXPERT.pattern in text, "of an expert"


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters(triton_v2, path):
    """By name, in order."""
    module, name = re.fullmatch(r"([a-z_.]+)\.([A-Z].*)", path).groups()
    found = Sources(triton_v2).parameters(f"sglang.srt.{module}", name)
    bound = name.endswith("from_layer")  # to the class
    assert list(found)[bound:] == SIGNATURES[path].split()


@pytest.mark.parametrize("part", ["HOOKS", "LEGACY", "TRITON_V2"])
def test_interface(release, part):
    """What a layer is checked for before moelora runs it."""
    if part == "TRITON_V2":
        only_where_there_is_triton_v2(release)
    assert interface.problem(getattr(interface, part), Sources(release).parameters) is None


# What the integration reads by name, and where SGLang gives it.
READ_OF_TRITON_V2 = {
    "lora/layers.py": "_moe_lora_runner _base_run_moe_core lora_backend TP_GLOBAL",
    "layers/quantization/fp8.py": (
        "block_quant use_mxfp8 weight_block_size w13_weight_scale_inv w2_weight_scale_inv"
    ),
    "layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py": (
        "w13_weight_packed w2_weight_packed w13_weight_scale w2_weight_scale w13_weight_g_idx "
        "w2_weight_g_idx is_marlin_converted num_bits sym group_size gptq_marlin_moe_repack "
        "marlin_moe_permute_scales"
    ),
    "layers/quantization/modelopt_quant.py": (
        "is_lora_marlin prepare_moe_nvfp4_layer_for_marlin w13_weight_scale_2 w2_weight_scale_2"
    ),
    "layers/quantization/marlin_utils_fp4.py": (
        "nvfp4_marlin_process_scales nvfp4_marlin_process_global_scale padded_intermediate_size"
    ),
    "layers/moe/fused_moe_triton/layer.py": (
        "params_dtype hidden_size intermediate_size_per_partition"
    ),
    "lora/moe/runner.py": (
        "gate_up_lora_a gate_up_lora_b down_lora_a down_lora_b token_lora_mapping "
        "routed_scaling_factor activation is_gated topk_output"
    ),
    "lora/backend/base_backend.py": "batch_info get_batch_info",
    "lora/backend/triton_v2_backend.py": "lora_ranks token_slots",
    "runtime_context.py": "LoRABatchLayout TP_GLOBAL",
}
READ = {
    "lora/layers.py": "FusedMoEWithLoRA base_layer lora_backend _lora_runner batch_info lora_info",
    "lora/lora_moe_runners.py": (
        "gate_up_lora_a_weights gate_up_lora_b_weights down_lora_a_weights down_lora_b_weights "
        "lora_ranks token_lora_mapping has_active_lora"
    ),
    "lora/backend/base_backend.py": "batch_info",
    "lora/utils.py": "use_cuda_graph lora_ranks",
    "layers/moe/moe_runner/runner.py": "runner_backend is_triton",
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


def missing(release, file, words):
    text = (release / "sglang/srt" / file).read_text()
    return [word for word in words.split() if not re.search(rf"\b{word}\b", text)]


@pytest.mark.parametrize("file", READ)
def test_names(release, file):
    assert missing(release, file, READ[file]) == []


@pytest.mark.parametrize("file", READ_OF_TRITON_V2)
def test_names_of_triton_v2(triton_v2, file):
    assert missing(triton_v2, file, READ_OF_TRITON_V2[file]) == []


def test_layers_of_gptq_and_awq_refuse_the_runners_of_adapters(triton_v2):
    """Docs say so: their runner is made where the backend is "auto" alone."""
    for name in (
        "layers/quantization/awq/schemes/awq_moe.py",
        "hardware_backend/gpu/quantization/gptq_kernels.py",
    ):
        text = (triton_v2 / "sglang/srt" / name).read_text()
        assert "assert get_moe_runner_backend().is_auto()" in text


def test_kernels_of_triton_v2_by_format(triton_v2):
    """The table of docs/serving.md; a format runs its first kernel where the named one has none."""
    text = (triton_v2 / "sglang/srt/lora/moe/base_gemm_provider/__init__.py").read_text()
    tree = ast.parse(text)
    (vendors,) = (n.value for n in tree.body if ast.unparse(n).startswith("VENDORS = "))
    assert ast.literal_eval(vendors) == {
        "bf16": ("cutedsl", "triton"),
        "fp8": ("cutedsl", "triton"),
        "nvfp4": ("marlin",),
    }
    assert "vendor = vendors[0]" in text
    text = (triton_v2 / "sglang/srt/layers/quantization/modelopt_quant.py").read_text()
    assert "if moe_runner_backend.is_lora() and not self._lora_marlin:" in text
    assert "use_marlin_fallback = (8, 0) <= capability < (10, 0)" in text  # Hopper, too
    text = (triton_v2 / "sglang/srt/lora/moe/runner.py").read_text()
    assert "if major not in (9, 10):" in text


def test_the_benchmark_hooks_what_loads_adapters(release):
    module, owner, name = HOOKED.rsplit(".", 2)
    sources = Sources(release)
    assert list(sources.parameters(module, f"{owner}.{name}")) == ["self"]
    assert "DefaultModelLoader(self.load_config)" in sources.text(module)


def test_buffers_are_laid_out_as_they_are_read(release):
    """The slices of A begin the largest rank apart, whatever an adapter's own; B is scaled."""
    text = Sources(release).text("sglang.srt.lora.mem_pool")
    assert "ci * max_r:ci * max_r + lora_rank" in text
    assert "w * lora_adapter.scaling" in text


@pytest.fixture
def hook_registry(release):
    path = release / REGISTRY  # needs the standard library alone
    spec = util.spec_from_file_location("sglang.srt.plugins.hook_registry", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: getattr(module, name) for name in ("HookRegistry", "HookType")}


def test_its_registry_applies_the_hooks(sglang, caplog):
    """On the stand-ins: SGLang logs a traceback and goes on where it cannot."""
    base_layer = make_base_layer(Spec().build())
    runner = runner_of(sglang.layer(base_layer, lora_ranks="these"))
    assert isinstance(runner, plugin.MoeLoraRunner) and runner.true_ranks() == "these"
    base_layer.with_bias = True
    assert runner_of(sglang.layer(base_layer)).run(None, None) == OWN
    layer = sglang.layer(make_base_layer(Spec().build()), name="csgmv")
    assert isinstance(layer._lora_runner, plugin.LegacyRunner)
    assert not [record for record in caplog.get_records("setup") if record.levelno >= logging.ERROR]
