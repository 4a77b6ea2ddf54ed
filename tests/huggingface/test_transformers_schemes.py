"""Whole quantized folders in transformers: every scheme's layers are right, or refused by name."""

import json
import re

import folder_cases
import pytest
import torch
from conftest import needs_gpu
from folder_cases import (
    CASES,
    COMMON,
    DEQUANTIZED,
    IDS,
    LAYER,
    LOADED,
    REFUSED,
    TENSORS,
    assert_mixed_batch,
    assert_weights,
    change_json,
    change_quantization,
    change_tensors,
    drop,
    make,
    put,
    quantized,
    refused,
)
from hf_models import assert_logits, transformers
from safetensors.torch import load_file, save_file

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import folder as folder_module
from moelora.integrations.transformers import scheme

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def said(monkeypatch):
    """What the log warns of."""
    lines = []
    monkeypatch.setattr(folder_module.log, "warning", lines.append)
    return lines


@pytest.mark.parametrize("case", LOADED)
def test_all_layers_have_the_numbers_of_the_folder(tmp_path, case):
    exact = make(tmp_path, case)
    assert_weights(moelora_hf.load_quantized(tmp_path, dtype=torch.bfloat16), exact)


@pytest.mark.parametrize(
    ("kind", "case", "own_names"),
    [
        ("mixtral", "gptq", False),  # block_sparse_moe.experts.0.w1
        ("mixtral", "ct_w4a16", True),  # block_sparse_moe.experts.0.gate_proj
        ("minimax_m2", "awq_symmetric", False),
        ("minimax_m2", "ct_fp8_block", True),
        ("gpt_oss", "ct_w4a16_asymmetric", False),  # rows in turns, biases of single experts
        ("gpt_oss", "auto_round_gptq", False),
        ("gpt_oss", "ct_mxfp4", False),
        ("gpt_oss", "modelopt_nvfp4", False),  # scales of gate and of up, rows in turns
        ("mixtral", "ct_nvfp4", False),
        ("minimax_m2", "gptq_of_attention", False),
        ("gpt_oss", "gptq_of_attention", False),
    ],
)
def test_experts_by_the_names_of_checkpoints(tmp_path, kind, case, own_names):
    exact = make(tmp_path, case, kind, own_names)
    assert_weights(moelora_hf.load_quantized(tmp_path), exact)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("qwen3_moe", "modelopt_nvfp4"),
        ("gpt_oss", "gptq_act_order"),  # dequantized; stored (K, N), gate and up in turns
    ],
)
def test_mixed_adapters_generate_as_on_dequantized_weights(tmp_path, kind, case):
    """Experts in tiles, and experts that are not; what other schemes give has these numbers."""
    exact = make(tmp_path, case, kind)
    assert_mixed_batch(tmp_path, exact, tmp_path / "adapters", IDS, dequantize=True)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_reads_is_refused_before_any_tensor_is_read(tmp_path, monkeypatch, case):
    make(tmp_path, case)

    def read(*arguments):
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(folder_module.Folder, "__getitem__", read)
    refused(tmp_path, CASES[case].refusal, NotImplementedError)
    if case not in DEQUANTIZED:
        said = refused(tmp_path, CASES[case].refusal, NotImplementedError, dequantize=True)
        assert "dequantize=True" not in said


@pytest.mark.parametrize("case", DEQUANTIZED)
def test_experts_that_no_kernel_reads_are_dequantized_if_asked_for(tmp_path, said, case):
    exact = make(tmp_path, case)
    model = moelora_hf.load_quantized(tmp_path, dequantize=True)
    assert_weights(model, exact)
    (line,) = [line for line in said if "the experts of 2 layers" in line]
    gib = 2 * 4 * 3 * 128 * 192 * 2 / 2**30
    assert line.endswith(f"are dequantized to bfloat16, {gib:.2f} GiB")
    assert CASES[case].refusal.split("; ")[0].split(r" \(")[0].removeprefix("experts are ") in line


@pytest.mark.parametrize("case", ["gptq", "ct_nvfp4", "ct_fp8_block"])
def test_experts_that_kernels_read_stay_quantized(tmp_path, case):
    make(tmp_path, case)
    model = moelora_hf.load_quantized(tmp_path, dequantize=True)
    for module, _ in moelora_hf.moe_layers(model).values():
        assert module.down_proj.weights.format in ("int4", "nvfp4", "fp8")


@pytest.mark.parametrize("case", ["ct_nvfp4_w4a4", "modelopt_nvfp4", "ct_nvfp4"])
def test_the_log_says_that_activations_stay(tmp_path, said, case):
    """W4A4 runs as W4A16: once for a folder, whatever the number of experts."""
    make(tmp_path, case)
    moelora_hf.load_quantized(tmp_path)
    lines = [line for line in said if "stay in the model's dtype (W4A16)" in line]
    assert len(lines) == (case != "ct_nvfp4")


@pytest.mark.parametrize("case", ["modelopt_nvfp4", "ct_nvfp4_w4a4"])
@pytest.mark.parametrize("lacking", [".experts.0.", ".experts.3.up_proj.", ".q_proj."])
def test_layers_without_scales_of_activations(tmp_path, case, lacking):
    """Calibration reaches some experts only; W4A16 needs no scale of activations."""
    exact = make(tmp_path, case)
    kept = lambda t: {n: v for n, v in t.items() if lacking not in n or ".input_" not in n}  # noqa: E731
    change_tensors(tmp_path, kept)
    assert_weights(moelora_hf.load_quantized(tmp_path), exact)


@pytest.mark.parametrize("case", ["modelopt_nvfp4", "ct_mxfp4", "gptq"])
def test_activations_are_for_fp8_experts(tmp_path, case):
    make(tmp_path, case)
    refused(tmp_path, "activations is 'fp8', wanted None: the weights are not", activations="fp8")


def test_biases_of_single_experts_are_not_reported_missing(tmp_path, monkeypatch):
    made = make(tmp_path, "ct_w4a16", "gpt_oss")
    reports = []
    kind = type(made)
    load = kind.from_pretrained.__func__

    def from_pretrained(cls, *arguments, **options):
        model, info = load(cls, *arguments, **options)
        reports.append(info["missing_keys"])
        return model, info

    monkeypatch.setattr(kind, "from_pretrained", classmethod(from_pretrained))
    model = moelora_hf.load_quantized(tmp_path)
    assert [set(report) for report in reports] == [set()]
    assert_weights(model, made)


def test_experts_in_one_tensor_are_read_for_mxfp4_alone(tmp_path):
    make(tmp_path, "modelopt_nvfp4")

    def stack(state):
        own = {n: v for n, v in state.items() if n.startswith(f"{LAYER}.")}
        stacked = {n: v for n, v in state.items() if n not in own}
        for part in ("weight", "weight_scale", "weight_scale_2"):
            suffix = "" if part == "weight" else f"_{part}"
            rows = [own[f"{LAYER}.{e}.down_proj.{part}"] for e in range(4)]
            stacked[f"{LAYER}.down_proj{suffix}"] = torch.stack(rows)
        return stacked

    change_tensors(tmp_path, stack)
    refused(tmp_path, "down_proj_weight_scale.* stacked tensors are re", NotImplementedError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "auto"}, "dtype is 'auto', wanted torch.bfloat16 or torch.float16"),
        ({"dtype": "float16"}, "dtype is 'float16', wanted torch.bfloat16 or torch.float16"),
        ({"dtype": torch.float32}, "dtype is torch.float32, wanted torch.bfloat16 or torch.fl"),
        ({"torch_dtype": torch.float16}, "torch_dtype is torch.float16, wanted none; use dtype"),
    ],
)
def test_dtypes_that_are_refused(tmp_path, options, message):
    refused(tmp_path, message, **options)


@pytest.mark.parametrize("is_file", [True, False])
def test_gguf_files_are_refused_with_what_to_do(tmp_path, is_file):
    path = tmp_path / "model-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    refused(path if is_file else tmp_path, r"no config.json, .*: GGUF is not read; load the file")


def test_a_folder_without_tensors(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has no safetensors files that transformers would load")
    (tmp_path / "model-q4_k_m.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "are never loaded: GGUF is not read; load the file with from_pretrained")


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path):
    """hf_quant_config.json of older exports, whose config.json says nothing."""
    exact = make(tmp_path, "modelopt_nvfp4")
    change_json(tmp_path / "config.json", lambda c: c.pop("quantization_config") and None)
    refused(tmp_path, "quant_method is None", NotImplementedError)
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    settings["exclude_modules"] = ["lm_head"]
    content = {"producer": {"name": "modelopt"}, "quantization": settings}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert_weights(moelora_hf.load_quantized(tmp_path), exact)


def test_the_log_says_what_is_dequantized_and_how_much_memory_that_takes(tmp_path, said):
    make(tmp_path, "ct_fp8_cache")
    moelora_hf.load_quantized(tmp_path)
    attention = 2 * (128 * 128 * 2 + 64 * 128 * 2)  # layers, q and o, k and v
    wanted = "8 linear layers beside the experts (FP8 of rows) are dequantized to bfloat16, "
    wanted += f"{attention * 2 / 2**30:.2f} GiB from "
    assert wanted in said[0]
    assert said[1].endswith("the cache of keys and values is not quantized")


def test_rows_of_gate_and_up_in_halves_are_refused(tmp_path):
    """What GPTQModel calls gate_proj of gpt-oss has rows of gate and of up, in turns."""
    make(tmp_path, "gptq", "gpt_oss")
    change_quantization(tmp_path, meta={"quantizer": ["gptqmodel:7.7.0"]})
    refused(tmp_path, "in turns, which GPTQModel cuts in halves", NotImplementedError)


def spoilt(byte):
    """The last scale is another e4m3."""

    def change(scales):
        bits = scales.view(torch.uint8).clone()
        bits[-1, -1] = byte
        return bits.view(torch.float8_e4m3fn)

    return change


ATTENTION = "model.layers.0.self_attn.q_proj"
SCALE = f"{ATTENTION}.weight_scale"
G_IDX = f"{LAYER}.1.down_proj.g_idx"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        (
            *("gptq", put(G_IDX, lambda order: order.flip(0))),
            r"experts.\*.down_proj: g_idx\[1\] is of weights in the order of their activations",
        ),
        (
            *("ct_w4a16", drop(f"{LAYER}.2.up_proj")),
            f"no quantized linear layer is gate_up_proj of expert 2 of {LAYER}; experts are call",
        ),
        (
            *("modelopt_fp8", drop(f"{LAYER}.0.gate_proj.input_scale")),
            "1 of 8 linear layers have no input_scale, wanted all or none: .*experts.0.gate_proj$",
        ),
        ("modelopt_nvfp4", put(f"{SCALE}_2", 0.0), f"{SCALE}_2 is 0, wanted a finite number ab"),
        (
            *("ct_nvfp4", put(f"{ATTENTION}.weight_global_scale", [1e-39])),
            "q_proj.weight_global_scale is 1e-39, wanted .* with a finite reciprocal",
        ),
        ("modelopt_nvfp4", put(SCALE, spoilt(0x7F)), f"{SCALE} has the e4m3 byte 127, NaN, wanted"),
        ("ct_nvfp4", put(SCALE, spoilt(0x90)), f"{SCALE} has the e4m3 byte 144, negative, wanted"),
        (
            *("modelopt_nvfp4", put(f"{ATTENTION}.weight", lambda weight: weight.view(torch.int8))),
            f"{ATTENTION}.weight has dtype torch.int8, wanted torch.uint8",
        ),
        (
            *("ct_w4a16 of gpt_oss", drop(f"{LAYER}.2.up_proj.bias")),
            f"the biases of expert 2 of {LAYER}.gate_up_proj are missing or of another shape",
        ),
        ("ct_w4a16", put(BIAS, [1.0] * 128), f"{BIAS} is a bias that the model does not have"),
        (
            *("gptq_attention_of_8_bits_in_order", put(f"{ATTENTION}.g_idx", lambda g: g + 9)),
            r"q_proj.g_idx has groups 9 to 10, wanted some of 2",
        ),
    ],
)
def test_damaged_folders(tmp_path, case, tensors, message):
    make(tmp_path, *case.split(" of "))
    change_tensors(tmp_path, tensors)
    refused(tmp_path, message)


def test_experts_of_several_schemes_in_one_layer(tmp_path):
    make(tmp_path, "gptq")
    change_quantization(tmp_path, dynamic={r"+:.*layers\.0.*experts\.3\..*": {"group_size": 128}})
    refused(tmp_path, r"experts.3.gate_proj is INT4 of GPTQ .*one sch", NotImplementedError)


def test_patterns_of_settings():
    """As `re.match` finds them, in bounded time: config.json is not trusted."""
    names = [
        *("lm_head", "model.layers.10.self_attn.q_proj", "model.layers.3.mlp.gate"),
        *("model.layers.3.mlp.experts.12.down_proj", "model.layers.3.block_sparse_moe.gate"),
    ]
    for pattern in (
        *("lm_head", "q_proj", "^model", ".*lm_head$", ".*self_attn.*", ".*self_attn.*proj$"),
        *(".*mlp.gate$", ".*mlp[.]gate$", r"model\.layers\.(?:[0-9]|1[0-5])\..*_proj"),
        r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    ):
        found = [scheme.matches(pattern, name) for name in names]
        assert found == [re.match(pattern, name) is not None for name in names], pattern
    for pattern in ("(", "a{e<=1}"):
        with pytest.raises(ValueError, match="is no pattern that is read: key"):
            scheme.matches(pattern, names[1])


def make_deepseek_v4(folder, expert_dtype):
    """As DeepSeek publishes it: `weight`, FP8 in blocks or MXFP4 in int8, and `scale`, e8m0."""
    config = transformers.DeepseekV4Config(
        **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe"],
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / TENSORS).items():
        own = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        if not re.search(r"\.(w[q123]_?[ab]?|wkv|wo_[ab])\.weight$", own):
            tensors[own] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        elif ".experts." in own and expert_dtype == "fp4":
            parts, meant[own] = folder_cases.mxfp4(tensor)
            tensors[own] = parts[".weight_packed"].view(torch.int8)
            scale = parts[".weight_scale"].view(torch.float8_e8m0fnu)
            tensors[own.replace("weight", "scale")] = scale
        else:
            exponent = torch.ceil(torch.log2(tensor.abs().max() / 448))
            tensors[own] = (tensor / exponent.exp2()).to(torch.float8_e4m3fn)
            scale = exponent.exp2().reshape(1, 1).to(torch.float8_e8m0fnu)
            tensors[own.replace("weight", "scale")] = scale
            meant[own] = tensors[own].float() * exponent.exp2()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / TENSORS)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    quantization |= {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    settings = {"expert_dtype": expert_dtype, "quantization_config": quantization}
    change_json(folder / "config.json", lambda config: config | settings)
    return meant


@pytest.mark.parametrize(("expert_dtype", "format"), [("fp4", "mxfp4"), ("fp8", "fp8")])
def test_deepseek_v4_by_its_own_names(tmp_path, expert_dtype, format):
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    meant = make_deepseek_v4(tmp_path, expert_dtype)
    model = moelora_hf.load_quantized(tmp_path)
    for layer, (module, _) in enumerate(moelora_hf.moe_layers(model).values()):
        assert module.gate_up_proj.weights.format == module.down_proj.weights.format == format
        up, down = (getattr(module, own).weights.unpack() for own in ("gate_up_proj", "down_proj"))
        for expert in range(4):
            w1, w2, w3 = (
                meant[f"layers.{layer}.ffn.experts.{expert}.{own}.weight"].bfloat16()
                for own in ("w1", "w2", "w3")
            )
            assert torch.equal(up[expert], torch.cat((w1, w3)))
            assert torch.equal(down[expert], w2)
    for own, theirs in (("attn.wq_a", "self_attn.q_a_proj"), ("attn.wo_b", "self_attn.o_b_proj")):
        weight = model.get_parameter(f"model.layers.1.{theirs}.weight")
        assert torch.equal(weight, meant[f"layers.1.{own}.weight"].bfloat16())
    shared = model.get_parameter("model.layers.0.mlp.shared_experts.down_proj.weight")
    assert torch.equal(shared, meant["layers.0.ffn.shared_experts.w2.weight"].bfloat16())
    assert model(IDS).logits.isfinite().all()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", ["modelopt_nvfp4", "ct_nvfp4", "gptq_act_order"])
def test_adapters_on_a_gpu(tmp_path, case):
    """Layers as on the CPU, whose numbers other tests compare: packed, or dequantized."""
    exact = make(tmp_path, case)
    adapters = quantized.make_adapters(exact, tmp_path / "adapters")
    _, logits, calls = quantized.serve(tmp_path, adapters, IDS, dequantize=True)
    ids = IDS.cuda()
    model, there, _ = quantized.serve(tmp_path, adapters, ids, dequantize=True, device_map="cuda")
    layers = moelora_hf.moe_layers(model)
    assert all(p.is_cuda for module, _ in layers.values() for p in module.parameters())
    wanted, _ = quantized.with_peft(exact, adapters, IDS, calls)
    naive, _ = quantized.with_peft(quantized.in_bfloat16(exact), adapters, IDS, calls)
    assert_logits(there.cpu(), wanted, naive)
    assert_logits(logits, wanted, naive)
