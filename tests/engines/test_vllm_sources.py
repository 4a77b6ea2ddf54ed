"""The interface tables against the sources of vLLM's releases, without importing them."""

import ast
import re

import pytest
from vllm_names import PROJ, VLLM
from vllm_sources import RELEASES, Sources, needs_sources

from benchmarks.tables import models
from moelora.adapters import engine_rules
from moelora.adapters.engine_names import STACKED
from moelora.integrations.vllm import interface
from moelora.integrations.vllm.formats import FORMATS

pytestmark = needs_sources
MODELS = "vllm.model_executor.models"


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def sources(request):
    return Sources(request.param)


PARTS = [n for n, part in vars(interface).items() if isinstance(part, interface.Interface)]


@pytest.mark.parametrize("part", PARTS)
def test_a_release_has_what_is_needed(sources, part):
    """Older schedulers have no function that holds requests back, which prefetch needs."""
    problem = interface.problem(getattr(interface, part), sources.parameters)
    older = part == "PREFETCH" and sources.folder != RELEASES[-1]
    assert problem is None or older and "Scheduler._handle_blocked_waiting_request" in problem


@pytest.mark.parametrize("name", FORMATS)
def test_methods_are_known_or_not_there(sources, name):
    """Marlin's class of compressed-tensors went into the other one in 0.27."""
    problem = interface.problem(FORMATS[name].needed, sources.parameters)
    if problem is not None:
        assert name == "compressed_tensors_marlin"
        assert problem.startswith("there is no vllm.")


def text_of(sources, model_type):
    names = VLLM[model_type][0].split()
    try:
        texts = (sources.text(n if "." in n else f"{MODELS}.{n}") for n in names)
        return "\n".join(texts)
    except ModuleNotFoundError as error:
        pytest.skip(f"this release has no {error}")


@pytest.mark.parametrize("model_type", VLLM)
def test_models_have_the_names_that_are_written(sources, model_type):
    """`moelora adapters --per-expert` is tested against this table."""
    _, block, projections, others = VLLM[model_type]
    text = text_of(sources, model_type)
    for attribute in [block, *(n for name in others.values() for n in name.split("."))]:
        if attribute not in ("", "up_proj", "proj"):
            assert re.search(rf"self\.{attribute}\b", text), attribute
    found = re.search(r"ckpt_names=\(([^)]*)\)", text)
    names = ast.literal_eval(f"({found[1]})") if found else PROJ
    assert tuple(name or None for name in names) == projections


@pytest.mark.parametrize("model_type", VLLM)
def test_which_models_have_adapters_of_embeddings(sources, model_type):
    """`moelora doctor --lora` goes by the rules of the newest release."""
    if sources.folder != RELEASES[-1]:
        pytest.skip("the rules are those of the newest release")
    text = text_of(sources, model_type)
    there = re.search(r"embedding_modules = \{\S", text) is not None
    assert there == (model_type in engine_rules._EMBEDDINGS)
    assert ("is_3d_moe_weight" in text) == (model_type in STACKED)


def bases(sources, module, name):
    """The names of a class of vLLM and of all that it inherits from."""
    try:
        found = sources.find(module, name)
    except ModuleNotFoundError:  # another package's
        found = None
    if found is None:
        return {name}
    names = (ast.unparse(parent) for parent in found[1].bases)
    return {name}.union(*(bases(sources, found[0], parent) for parent in names))


@pytest.mark.parametrize("model", models.MODELS.values(), ids=lambda model: model.model_type)
def test_models_that_people_name_have_adapters_in_the_newest_release(sources, model):
    """And the activation by which docs/answers.md finds their formats."""
    if sources.folder != RELEASES[-1]:
        pytest.skip("the page is of the newest release")
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    name = names[models.AS.get(model.model_type, model.model_type)]
    registry = sources.text(f"{MODELS}.registry")
    module, cls = re.search(rf"(?i)'{name}': \('([\w.]+)', '(\w+)'\)", registry).groups()
    module = module if "." in module else f"{MODELS}.{module}"
    assert "SupportsLoRA" in bases(sources, module, cls)
    text = sources.text(module)
    assert ("activation='swigluoai'" in text) == (model.activation == "swigluoai")
    assert ("activation_without_mul(" in text) == (model.activation == "relu2")


KEYS = [
    "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight",
    "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight",
    "model.layers.0.self_attn.q_proj.lora_B.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model._orig_mod.lm_head.lora_A.weight",
    "base_model.model.lm_head.lora_A.default.weight",
    "base_model.model.lm_head.weight",
    "base_model.model.lm_head.lora_C.weight",
    "lora_A.weight",
]


@pytest.mark.parametrize("key", KEYS)
def test_names_of_factors_are_read_as_vllm_reads_them(sources, key):
    (parse,) = sources.functions("vllm.lora.utils", "parse_fine_tuned_lora_name")
    match = engine_rules._FACTOR.fullmatch(key)
    try:
        module, _ = parse(key)
    except ValueError:
        module = None
    assert (module or None) == (match and match["module"].removeprefix("base_model.model."))


# What formats.py reads of a method or of the layer that it loaded, by name, beside `experts_cls`.
READ = {
    "gpt_oss": "mxfp4_backend w13_weight w13_weight_scale w2_bias",
    "mxfp4": "mxfp4_backend w13_weight w13_weight_scale w2_bias",
    "mxfp4_compressed_tensors": (
        "use_cutlass_mxfp4 w13_weight_packed w13_weight_scale w2_weight_packed"
    ),
    "nvfp4_modelopt": (
        "use_a16 nvfp4_backend w13_weight w13_weight_scale w13_weight_scale_2 w2_weight_scale_2 "
        "w13_input_scale"
    ),
    "nvfp4_compressed_tensors": (
        "use_a16 nvfp4_backend w13_weight_packed w13_weight_scale w13_weight_global_scale "
        "w2_weight_global_scale"
    ),
    "gptq": "quant_config w13_qweight w13_scales group_size weight_bits is_sym",
    "awq": "quant_config w13_qweight w13_scales w13_qzeros group_size zero_point",
    "compressed_tensors": (
        "w13_weight_packed w13_weight_scale w13_weight_zero_point is_transposed symmetric num_bits "
        "group_size"
    ),
    "fp8": "weight_block_size block_quant w13_weight weight_scale_inv weight_scale w13_input_scale",
    "fp8_compressed_tensors": (
        "weight_quant weight_block_size w13_weight w13_weight_scale w13_input_scale"
    ),
}
READ["compressed_tensors_marlin"] = READ["compressed_tensors"]


@pytest.mark.parametrize("name", READ)
def test_what_is_read_of_a_method_is_there(sources, name):
    module = next(iter(FORMATS[name].needed.replaced))
    try:
        text = sources.text(module)
    except ModuleNotFoundError:
        pytest.skip(f"this release has no {module}")
    absent = [word for word in ("experts_cls", *READ[name].split()) if word not in text]
    if name == "compressed_tensors" and "experts_cls" in absent:  # of 0.26, which is not served
        return
    assert absent == []


def test_kernels_of_nvfp4_weights_alone(sources):
    """Those whose activations are of 16 bits, by their names in vLLM's choice."""
    text = sources.text("vllm.model_executor.layers.fused_moe.oracle.nvfp4")
    assert re.search(r"MARLIN = .MARLIN.", text) and re.search(r"HUMMING = .HUMMING.", text)


def test_how_a_release_quantizes_activations(sources):
    """Whether it divides by a scale or takes its inverse, as docs/weight-formats.md says."""

    def body(file, function):
        (path,) = sources.folder.glob(f"csrc/**/w8a8/fp8/{file}")
        text = path.read_text()
        start = text.index(f" {function}(")
        return text[start : text.index("\n}\n", start)]

    groups = body("per_token_group_quant.cu", "QuantizeGroup")
    version = tuple(map(int, re.findall(r"\d+", sources.folder.name)[:2]))
    assert ("float>(src) * inv_y" in groups) == (version >= (0, 33))
    assert ("float>(src) / y_s" in groups) == (version < (0, 33))
    static = body("common.cu", "scaled_fp8_quant_kernel_strided_group_shape")
    assert "1.0f / scale[" in static and "scaled_fp8_conversion<true" in static
    tokens = body("common.cu", "dynamic_per_token_scaled_fp8_quant_kernel_strided")
    assert "scaled_fp8_conversion<false" in tokens


def test_the_trap_is_still_one(sources):
    """`TritonWNA16Experts` supports LoRA by inheritance, and its apply reads no context."""
    place = "vllm.model_executor.layers.fused_moe.experts.triton_moe"
    module, node = sources.find(place, "TritonWNA16Experts")
    assert "_lora_context" not in ast.unparse(node)
    assert sources.method(module, node, "set_lora_context") is not None


def test_a_switch_of_the_manager_splits_stacks_of_experts(sources):
    """`update_adapters` sets it for as long as it reads an adapter."""
    manager = sources.text("vllm.lora.model_manager")
    if "_convert_3d_to_2d_moe_lora" not in manager:
        pytest.skip("this release splits no stacks")
    switch = (
        "self._enable_mixed_moe_lora_format and getattr(lora_model, 'is_3d_lora_weight', False)"
    )
    merging = manager[manager.index("def _create_merged_loras_inplace") :]
    assert f"if {switch}:" in merging[: merging.index("def _stack_moe_lora_weights")]
    assert "gate_up_b[:, :intermediate, :]" in manager  # gate, then up


def test_what_batches_of_idle_ranks_rely_on(sources):
    """Both model runners run them in the context that is replaced; where no token has an adapter,
    kernels of a captured graph find none, and the mapping of tokens is exchanged all the same."""

    def method(module, path):
        cls, name = path.split(".")
        return ast.unparse(sources.method(*sources.find(module, cls), name))

    worker = "vllm.v1.worker"
    batch = method(f"{worker}.gpu_worker", "Worker.execute_dummy_batch")
    assert "self.model_runner._dummy_run(" in batch
    for runner in (f"{worker}.gpu_model_runner", f"{worker}.gpu.model_runner"):
        dummy_run = method(runner, "GPUModelRunner._dummy_run")
        assert "with self.maybe_dummy_run_with_lora(" in dummy_run
    kernels = "vllm.lora.ops.triton_ops.lora_kernel_metadata"
    before_return = method(kernels, "LoRAKernelMeta.prepare_tensors").partition("return")[0]
    assert "self._reset()" in before_return
    assert "self.active_lora_ids.fill_(-1)" in method(kernels, "LoRAKernelMeta._reset")
    naive = "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep"
    prepare = method(naive, "MoEPrepareAndFinalizeNaiveDPEPModular.prepare")
    assert "if lora_ctx is not None:" in prepare and "no_lora" not in prepare


def test_what_the_route_of_updates_reads_of_a_server(sources):
    """Of a release that has endpoint plugins: they are loaded by name, and find the models."""
    try:
        plugins = sources.text("vllm.plugins.endpoint_plugins.interface")
        states = sources.text("vllm.entrypoints.launchers.api_server.app_state")
    except ModuleNotFoundError as error:
        if "endpoint_plugins" in str(error):
            pytest.skip("this release has no endpoint plugins")
        plugins = states = sources.text("vllm.entrypoints.openai.api_server")  # of 0.26
    assert "plugin.attach_router(app)" in plugins
    assert "await plugin.init_state(engine_client, state, args)" in plugins
    loads = sources.text("vllm.plugins")
    assert "'vllm.endpoint_plugins'" in loads and "if envs.VLLM_PLUGINS is None:" in loads
    models = sources.text("vllm.entrypoints.openai.models.serving")
    assert "self.lora_requests: dict[str, LoRARequest]" in models and "def is_base_model" in models
    assert "state.openai_serving_models = OpenAIServingModels(" in states
