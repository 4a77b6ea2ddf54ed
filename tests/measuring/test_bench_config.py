"""`moelora bench --model config.json`: the layer that a Hugging Face configuration describes."""

import json

import pytest

from moelora.__main__ import main
from moelora.bench import config, shapes

QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "hidden_act": "silu",
}
MIXTRAL = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "mxfp4"},
}
DBRX = {
    "d_model": 6144,
    "ffn_config": {
        "moe_num_experts": 16,
        "moe_top_k": 4,
        "ffn_hidden_size": 10752,
        "ffn_act_fn": {"name": "silu"},
    },
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
}


@pytest.fixture
def write(tmp_path):
    def write(content):
        folder = tmp_path / "some-model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(content))
        return str(folder / "config.json")

    return write


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (QWEN, "qwen3"),
        (MIXTRAL, "mixtral"),
        (DBRX, "dbrx"),
        ({"text_config": QWEN, "hidden_size": 1}, "qwen3"),
    ],
)
def test_sizes_are_those_of_the_published_models(write, content, key):
    _, found = config.read(write(content))
    wanted = shapes.MODELS[key]
    for name in ("experts", "top_k", "hidden", "intermediate", "activation", "bias", "format"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_gpt_oss_has_its_activation_biases_and_format(write):
    key, found = config.read(write(GPT_OSS))
    assert key == "some-model"
    assert found == shapes.Model("some-model", 32, 4, 2880, 2880, "swigluoai", True, "mxfp4")


@pytest.mark.parametrize(
    ("quantized", "format"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "w_bit": 4}, "int4"),
        (COMPRESSED, "int4"),
    ],
)
def test_the_format_is_the_checkpoints_unless_one_is_said(write, quantized, format):
    path = write({**QWEN, "quantization_config": quantized})
    assert config.read(path)[1].format == format
    assert config.read(path, "bf16")[1].format is None
    assert config.read(path, "mxfp4")[1].format == "mxfp4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hidden_size": 64}, "describes no mixture of experts: none of num_experts"),
        ({**QWEN, "hidden_act": "tanh"}, "hidden_act is 'tanh', wanted one of silu"),
        ({**QWEN, "num_experts_per_tok": 200}, "chooses 200 of 128 experts"),
        ({**QWEN, "quantization_config": {"quant_method": "bnb"}}, "quant_method is 'bnb'"),
        ({**QWEN, "quantization_config": {"quant_method": "gptq", "bits": 3}}, "say one by --form"),
        ([], "it holds a list"),
    ],
)
def test_what_cannot_be_measured_is_named(write, content, message, capsys):
    assert main(["bench", "--model", write(content), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moelora bench: ")
    assert message in said
