"""16-bit folders whose experts are rounded while they are loaded, and what bitsandbytes saves."""

import folder_cases
import pytest
import torch
from folder_cases import IDS, LAYER, TENSORS, change_json, make, refused, stacks
from hf_models import transformers
from safetensors.torch import save_file

import moelora
import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import folder as folder_module

pytestmark = pytest.mark.usefixtures("no_grad")


def plain(folder, kind):
    """Writes a folder of bfloat16, as `save_pretrained` does; returns its model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **folder_cases.CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.bfloat16().save_pretrained(folder, max_shard_size="200KB")
    return model


def assert_rounded(loaded, model, rounding):
    packed, is_transposed = stacks(loaded), loaded.get_submodule(LAYER).is_transposed
    for name, dense in stacks(model).items():
        dense = dense.transpose(1, 2) if is_transposed else dense
        expected = moelora.QuantizedWeights.from_dense(dense, rounding).unpack()
        assert torch.equal(packed[name].weights.unpack(), expected)
    assert loaded(IDS).logits.isfinite().all()


@pytest.mark.parametrize("rounding", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_rounded_while_they_are_loaded(tmp_path, monkeypatch, kind, rounding):
    """One by one, as checkpoints have them, or from stacks, which gpt-oss has as (K, N)."""
    model = plain(tmp_path, kind)
    most = max(p.numel() for n, p in model.named_parameters() if "experts" not in n or "bias" in n)
    original = folder_module.Folder.__getitem__

    def read(self, name):
        tensor = original(self, name)
        assert tensor.numel() <= max(most, 192 * 128), "more than an expert"
        return tensor

    monkeypatch.setattr(folder_module.Folder, "__getitem__", read)
    assert_rounded(moelora_hf.load_quantized(tmp_path, experts=rounding), model, rounding)


@pytest.mark.parametrize(
    ("case", "experts", "message"),
    [
        ("gptq", "nf4", "experts is 'nf4', and .*experts.0.down_proj is quantized, wanted None"),
        ("bnb_nf4_of_attention", "nf8", "experts is 'nf8', wanted None, or one of 'nf4', 'fp4', "),
    ],
)
def test_what_cannot_be_rounded(tmp_path, case, experts, message):
    make(tmp_path, case)
    refused(tmp_path, message, experts=experts)


def test_the_layer_of_columns_that_do_not_fit_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(folder_cases.CONFIGS["qwen3_moe"], "hidden_size", 160)
    plain(tmp_path, "qwen3_moe")
    message = "layers.0.mlp.experts.gate_up_proj: K is 160, expected a multiple of 64 for nf4"
    refused(tmp_path, message, experts="nf4")


def test_attention_of_bitsandbytes_beside_rounded_experts(tmp_path):
    exact = make(tmp_path, "bnb_nf4_of_attention")
    loaded = moelora_hf.load_quantized(tmp_path, experts="nf4").state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(loaded[name], exact.state_dict()[name].bfloat16())


def test_what_bitsandbytes_itself_has_saved(tmp_path):
    """Attention in nested NF4 but for a module that it skips, experts in 16 bits."""
    functional = pytest.importorskip("bitsandbytes.functional")
    plain(tmp_path / "plain", "qwen3_moe")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "o_proj"],
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "nf4")
    loaded = moelora_hf.load_quantized(tmp_path / "nf4", experts="nf4")
    kinds = set()
    for name, parameter in loaded.named_parameters():
        wanted = model.get_parameter(name)
        kinds.add(type(wanted).__name__)
        if hasattr(wanted, "quant_state"):
            wanted = functional.dequantize_4bit(wanted.data, wanted.quant_state)
        assert torch.equal(parameter, wanted), name
    assert kinds == {"Parameter", "Params4bit"}
    assert loaded(IDS).logits.isfinite().all()


def test_experts_are_rounded_in_a_model_that_bitsandbytes_has_loaded(tmp_path):
    """Linear layers stay those of bitsandbytes, as docs/training.md has it for QLoRA."""
    linear = pytest.importorskip("bitsandbytes.nn").Linear4bit
    model = plain(tmp_path, "qwen3_moe")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.bfloat16
    )
    moelora_hf.load_quantized_experts(loaded, tmp_path, experts="nf4")
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, linear)
    assert_rounded(loaded, model, "nf4")
    message = "quantization_config is a BitsAndBytesConfig, wanted none; experts=.nf4. rounds"
    refused(tmp_path, message, quantization_config=config)
    refused(tmp_path, "quant_method is None, .*experts=.nf4.", NotImplementedError)


def stacked(folder, kind, **options):
    """A folder of bfloat16 whose experts' parameters bitsandbytes has replaced; its model."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = plain(folder, kind)
    for module, _ in moelora_hf.moe_layers(model).values():
        for own in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(module, own, quant_type="nf4", **options)
    settings = {"quantization_config": folder_cases.BNB}
    change_json(folder / "config.json", lambda config: config | settings)
    for file in folder.glob("model*"):
        file.unlink()
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, folder / TENSORS)
    return model


@pytest.mark.parametrize("compress_statistics", [False, True])
def test_stacks_that_bitsandbytes_has_replaced(tmp_path, compress_statistics):
    model = stacked(tmp_path, "qwen3_moe", compress_statistics=compress_statistics)
    loaded = moelora_hf.load_quantized(tmp_path)
    packed = stacks(loaded)
    for name, replaced in stacks(model).items():
        assert torch.equal(packed[name].weights.unpack(), replaced)
    assert loaded(IDS).logits.isfinite().all()


def test_stacks_whose_blocks_run_along_rows_are_refused(tmp_path):
    stacked(tmp_path, "gpt_oss")
    refused(tmp_path, r"stored \(E, K, N\).* with experts='nf4'", NotImplementedError)
