"""Whole quantized folders in transformers: every scheme's layers are right, or refused by name."""

import json
import re

import pytest
import torch
from folder_cases import CASES, LOADED, REFUSED, make, quantized
from hf_models import assert_logits
from safetensors.torch import load_file, save_file

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import folder as folder_module
from moelora.integrations.transformers import schemes

IDS = torch.randint(2, 128, (6, 9), generator=torch.Generator().manual_seed(3))
TENSORS = "model.safetensors"


def assert_weights(model, exact):
    """Dense layers bit for bit; experts but for the scale's rounding, then the product's."""
    wanted = exact.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.pop(name).bfloat16()), name
    for name, (module, _) in moelora_hf.moe_layers(model).items():
        for own in ("gate_up_proj", "down_proj"):
            weights, meant = getattr(module, own).weights, wanted.pop(f"{name}.{own}")
            meant = meant.transpose(1, 2) if module.is_transposed else meant
            rtol = 0 if weights.format == "mxfp4" else 2.05 * quantized.BFLOAT16
            torch.testing.assert_close(weights.unpack().float(), meant, rtol=rtol, atol=0)
    assert not [name for name in wanted if "rotary" not in name and "e_score" not in name]


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
    ],
)
def test_experts_by_the_names_of_checkpoints(tmp_path, kind, case, own_names):
    exact = make(tmp_path, case, kind, own_names)
    assert_weights(moelora_hf.load_quantized(tmp_path), exact)


@pytest.mark.parametrize(
    ("kind", "case"),
    [("gpt_oss", "ct_w4a16_asymmetric"), ("mixtral", "gptq"), ("qwen3_moe", "ct_fp8_attention")],
)
@torch.no_grad()
def test_mixed_adapters_generate_as_on_dequantized_weights(tmp_path, kind, case):
    exact = make(tmp_path, case, kind)
    adapters = quantized.make_adapters(exact, tmp_path / "adapters")
    model, logits, calls = quantized.serve(tmp_path, adapters, IDS)
    wanted, layers = quantized.with_peft(exact, adapters, IDS, calls)
    naive, naive_layers = quantized.with_peft(quantized.in_bfloat16(exact), adapters, IDS, calls)
    assert_logits(logits, wanted, naive)
    for name, layer in layers.items():
        theirs = (naive_layers[name] - layer).abs().max()
        floor = quantized.BFLOAT16 * layer.abs().max()
        assert (calls[name][-1] - layer).abs().max() <= 1.5 * theirs + floor
    texts = model.generate(IDS, adapter_names=quantized.ROWS, max_new_tokens=3, do_sample=False)
    assert torch.equal(texts[:, IDS.shape[1]], logits[:, -1].argmax(-1))


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_reads_is_refused_before_any_tensor_is_read(tmp_path, monkeypatch, case):
    make(tmp_path, case)

    def read(*arguments):
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(folder_module.Folder, "__getitem__", read)
    with pytest.raises(NotImplementedError, match=CASES[case].refusal):
        moelora_hf.load_quantized(tmp_path)


def test_the_log_says_what_is_dequantized_and_how_much_memory_that_takes(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(folder_module.log, "warning", said.append)
    make(tmp_path, "ct_fp8_cache")
    moelora_hf.load_quantized(tmp_path)
    attention = 2 * (128 * 128 * 2 + 64 * 128 * 2)  # layers, q and o, k and v
    wanted = "8 linear layers beside the experts (FP8 of rows) are dequantized to bfloat16, "
    wanted += f"{attention * 2 / 2**30:.2f} GiB from "
    assert wanted in said[0]
    assert said[1].endswith("the cache of keys and values is not quantized")


def change(folder, tensors):
    state = load_file(folder / TENSORS)
    changed = tensors(state)
    save_file({name: t.contiguous() for name, t in changed.items()}, folder / TENSORS)


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("case", "kind", "tensors", "message"),
    [
        (
            "gptq",
            "qwen3_moe",
            lambda t: (
                t | {f"{EXPERTS}.1.down_proj.g_idx": t[f"{EXPERTS}.1.down_proj.g_idx"].flip(0)}
            ),
            r"experts.\*.down_proj: g_idx\[1\] is of weights in the order of their activations",
        ),
        (
            "ct_w4a16",
            "qwen3_moe",
            lambda t: {n: v for n, v in t.items() if f"{EXPERTS}.2.up_proj" not in n},
            f"no quantized linear layer is gate_up_proj of expert 2 of {EXPERTS}; experts are call",
        ),
        (
            "ct_w4a16",
            "gpt_oss",
            lambda t: {n: v for n, v in t.items() if n != f"{EXPERTS}.2.up_proj.bias"},
            f"the biases of expert 2 of {EXPERTS}.gate_up_proj are missing or of another shape",
        ),
        (
            "ct_w4a16",
            "qwen3_moe",
            lambda t: t | {"model.layers.1.self_attn.q_proj.bias": torch.ones(128)},
            "self_attn.q_proj.bias is a bias that the model does not have",
        ),
        (
            "gptq_attention_of_8_bits_in_order",
            "qwen3_moe",
            lambda t: {n: v + 9 if n.endswith("q_proj.g_idx") else v for n, v in t.items()},
            r"q_proj.g_idx has groups 9 to 10, wanted some of 2",
        ),
    ],
)
def test_damaged_folders(tmp_path, case, kind, tensors, message):
    make(tmp_path, case, kind)
    change(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        moelora_hf.load_quantized(tmp_path)


def test_experts_of_several_schemes_in_one_layer(tmp_path):
    make(tmp_path, "gptq")
    settings = json.loads((tmp_path / "config.json").read_text())
    over = {r"+:.*layers\.0.*experts\.3\..*": {"group_size": 128}}
    settings["quantization_config"]["dynamic"] = over
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(NotImplementedError, match=r"experts.3.gate_proj is INT4 of GPTQ .*one sch"):
        moelora_hf.load_quantized(tmp_path)


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
        found = [schemes._matches(pattern, name) for name in names]
        assert found == [re.match(pattern, name) is not None for name in names], pattern
    for pattern in (r"([a-z_.\d]+)*!", "(.*)*x", "(", "(?=.*x)"):
        with pytest.raises(ValueError, match="is no pattern that is read: key"):
            schemes._matches(pattern, names[1])
