"""`enable(model)`, the table of architectures, and where adapters of other layers are sent."""

import pytest
import torch
from hf_models import MODELS, gpt_oss, make_model, qwen3, tokens, transformers
from transformers.integrations import mxfp4

import moelora.integrations.transformers as moelora_hf
from benchmarks import architectures


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.__name__)
@torch.no_grad()
def test_experts_are_moeloras(config, monkeypatch):
    model = make_model(config)
    moelora_hf.enable(model)
    asked = []
    implementation = moelora_hf.IMPLEMENTATION

    def counted(self, *args, **kwargs):
        asked.append(self)
        return moelora_hf.experts_forward(self, *args, **kwargs)

    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    monkeypatch.setitem(functions._local_mapping, implementation, counted)
    model(tokens())
    assert set(asked) == {module for module, _ in moelora_hf.moe_layers(model).values()}


OWN_EXPERTS = {
    "llama4_text": "Llama4TextExperts",
    "jetmoe": "JetMoeParallelExperts",
    "doge": "DogeForCausalLM has no experts behind",
    "longcat_flash": "LongcatFlash",
    "nllb-moe": "NllbMoeExperts",
    "switch_transformers": "SwitchTransformersExperts",
}


@pytest.mark.parametrize("model_type", OWN_EXPERTS)
def test_models_whose_experts_are_code_of_their_own(model_type):
    """They ask for no implementation, and ran as before without a word."""
    asked, reason = architectures.ask(model_type)
    assert asked
    assert OWN_EXPERTS[model_type] in reason


def test_a_model_without_experts():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has no experts behind"):
        moelora_hf.enable(model)


def test_a_model_of_which_some_experts_are_not_reached():
    model = make_model(qwen3)
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    before = model.config._experts_implementation
    with pytest.raises(NotImplementedError, match=r"mlp\.experts of Qwen3MoeForCausalLM do not go"):
        moelora_hf.enable(model)
    assert model.config._experts_implementation == before


@pytest.mark.parametrize("call", ["enable", "load_adapters"])
def test_experts_that_transformers_has_swizzled(call):
    model = make_model(gpt_oss)
    for layer in model.model.layers:
        layer.mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)
    before = model.config._experts_implementation
    message = r"0\.mlp\.experts is Mxfp4GptOssExperts, whose .* triton_kernels, .*load_quantized"
    with pytest.raises(NotImplementedError, match=message):
        if call == "enable":
            moelora_hf.enable(model)
        else:
            moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=4)
    assert model.config._experts_implementation == before


def test_an_activation_that_is_not_there():
    model = make_model(qwen3)
    for module, _ in moelora_hf.moe_layers(model).values():
        module.act_fn = torch.nn.Tanh()
    with pytest.raises(NotImplementedError, match=r"layers\.1\.mlp\.experts: the activation"):
        moelora_hf.enable(model)


def test_the_table_has_its_rows(capsys):
    architectures.main(["--only", "mixtral", "doge"])
    lines = capsys.readouterr().out.splitlines()
    assert "| `mixtral` | yes |  |" in lines
    (doge,) = [line for line in lines if "doge" in line]
    assert doge.startswith("| `doge` * | no | DogeForCausalLM has no experts")
