"""`enable(model)`, the table of architectures, and where adapters of other layers are sent."""

import copy

import pytest
import torch
from adapter_cases import of_rank, write
from hf_models import MODELS, make_model, tokens, transformers
from linear_cases import pair
from safetensors.torch import save_file
from transformers.integrations import mxfp4

import moelora.integrations.transformers as moelora_hf
from benchmarks import architectures

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("config", MODELS)
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
    "doge": "DogeForCausalLM has no experts that use",
    "longcat_flash": "LongcatFlash",
    "nllb-moe": "NllbMoeExperts",
    "switch_transformers": "SwitchTransformersExperts",
}


@pytest.mark.parametrize("model_type", OWN_EXPERTS)
def test_models_whose_experts_are_code_of_their_own(model_type):
    """They ask for no implementation, and ran as before without a word."""
    answer, reason = architectures.ask(model_type)
    assert answer == "no"
    assert OWN_EXPERTS[model_type] in reason


def test_a_model_without_experts():
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has no experts that use"):
        moelora_hf.enable(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=4)


def test_a_model_of_which_some_experts_are_not_reached():
    model = make_model("qwen3_moe")
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    before = model.config._experts_implementation
    with pytest.raises(NotImplementedError, match=r"mlp\.experts of Qwen3MoeForCausalLM do not go"):
        moelora_hf.enable(model)
    assert model.config._experts_implementation == before


@pytest.mark.parametrize("call", ["enable", "load_adapters"])
def test_experts_that_transformers_has_swizzled(call):
    model = make_model("gpt_oss")
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


def test_the_table_has_its_rows(capsys):
    architectures.main(["--only", "mixtral", "doge"])
    lines = capsys.readouterr().out.splitlines()
    assert "| `mixtral` | yes |  |" in lines
    (doge,) = [line for line in lines if "doge" in line]
    assert doge.startswith("| `doge` * | no | DogeForCausalLM has no experts")


# ---- models whose weights are not in memory ----


@pytest.mark.parametrize("config", ["qwen3_moe", "gpt_oss"])
def test_offloaded_experts_run(config, tmp_path):
    """accelerate brings weights for each call."""
    accelerate = pytest.importorskip("accelerate")
    model = make_model(config)
    wanted = make_model(config)
    moelora_hf.enable(wanted)
    accelerate.cpu_offload(model, execution_device="cpu")
    name = next(iter(moelora_hf.moe_layers(model)))
    for _ in range(2):
        moelora_hf.enable(model)
        torch.testing.assert_close(model(tokens()).logits, wanted(tokens()).logits)
    with pytest.raises(NotImplementedError, match=rf"{name} is offloaded: .* stay on one device"):
        moelora_hf.load_quantized_experts(model, folder_of_nothing(tmp_path))


def folder_of_nothing(path):
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    save_file({"a": torch.zeros(1)}, path / "model.safetensors")
    return path


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
def test_experts_on_several_gpus_run():
    accelerate = pytest.importorskip("accelerate")
    model = make_model("gpt_oss").to(torch.bfloat16)
    moelora_hf.enable(model)
    wanted = copy.deepcopy(model).to("cuda:0")(tokens().to("cuda:0")).logits
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    accelerate.dispatch_model(model, places)
    assert torch.equal(model(tokens().to("cuda:0")).logits.to("cuda:0"), wanted)


def test_a_rank_that_no_engine_serves_has_to_be_asked_for(tmp_path):
    """One expert of a small file would make all of every slot that wide."""
    state, _ = pair("model.layers.1.mlp.experts.0.down_proj", 24, 32, r=600)
    write(tmp_path, state, of_rank(600))
    model = make_model("qwen3_moe")
    with pytest.raises(ValueError, match="adapter 'a' has rank 600, .* pass max_rank="):
        moelora_hf.load_adapters(model, {"a": tmp_path})
    assert moelora_hf.load_adapters(model, {"a": tmp_path}, max_rank=600).names() == ["a"]
