"""Small models of every kind in docs/answers.md, in every format: trained, saved and served."""

import pytest
import torch
from hf_models import peft, transformers

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf
from benchmarks.tables import models
from moelora.integrations.transformers.empty import factory
from moelora.integrations.transformers.tiny import _parts, shrunk

REACHED = models.architectures()
NAMED = [m.model_type for m in models.MODELS.values() if REACHED.get(m.model_type) == "yes"]
ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}
LAYERS = {  # where two layers are not enough to say
    "deepseek_v3": {"first_k_dense_replace": 1},
    "deepseek_v32": {"mlp_layer_types": ["dense", "sparse"]},
    "granitemoehybrid": ATTENTION,
    "nemotron_h": {"layers_block_type": ["moe", "attention"]},
    "qwen3_5_moe": {"text_config": {"num_hidden_layers": 2, **ATTENTION}},
    "qwen3_next": ATTENTION,
    "qwen3_vl_moe": {"text_config": {"num_hidden_layers": 2}},
}


def small(model_type):
    """Two layers, of sizes that every format has tiles for."""
    options = {"num_hidden_layers": 2, **LAYERS.get(model_type, {})}
    config = shrunk(transformers.AutoConfig.for_model(model_type, **options))
    for part in (config, *_parts(config)):
        for name in {"intermediate_size", "moe_intermediate_size"} & vars(part).keys():
            setattr(part, name, 64)
    return config


def save(model_type, folder):
    config = small(model_type)
    make = factory(config)
    torch.manual_seed(0)
    model = getattr(make, "_from_config", getattr(make, "from_config", None))(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return type(model)


@pytest.mark.parametrize("form", models.FORMATS)
@pytest.mark.parametrize("model_type", NAMED)
def test_it_is_trained_and_served(tmp_path, model_type, form):
    cls = save(model_type, tmp_path / "base")

    def load():
        if form == "bf16":
            return cls.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
        return moelora_hf.load_quantized(tmp_path / "base", experts=form.lower())

    model = load()
    layers = moelora_hf.moe_layers(model)
    experts = ("gate_up_proj", "up_proj", "down_proj")
    targets = [f"{n}.{own}" for n, (m, _) in layers.items() for own in experts if hasattr(m, own)]
    config = peft.LoraConfig(target_modules=[], target_parameters=targets, init_lora_weights=False)
    trained = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    moelora_peft.attach(trained.train())
    ids = torch.randint(2, 200, (2, 8), generator=torch.Generator().manual_seed(1))
    trained(ids, labels=ids, use_cache=False).loss.backward()
    gradients = [p.grad for p in trained.parameters() if p.requires_grad]
    assert len(gradients) == 2 * len(targets) == 4 * len(layers) > 0
    assert all(grad.isfinite().all() and grad.any() for grad in gradients)
    trained.save_pretrained(tmp_path / "adapter")
    served = load().eval()
    with torch.no_grad():
        wanted = trained.eval()(ids, use_cache=False).logits[0]
        moelora_hf.load_adapters(served, {"a": tmp_path / "adapter"})
        base = served(ids, use_cache=False, adapter_names=[None, None]).logits
        mixed = served(ids, use_cache=False, adapter_names=["a", None]).logits
    assert torch.equal(mixed[1], base[1])
    assert not torch.equal(mixed[0], base[0])
    effect = (wanted - base[0]).abs().median()
    assert (mixed[0] - wanted).abs().median() <= 0.05 * effect


def test_models_that_transformers_does_not_serve():
    """By a class of another model, or for the reason in docs/architectures.md."""
    others = {m.model_type for m in models.MODELS.values()} - set(NAMED)
    assert others == {"kimi_k2", "llama4"}
    assert "kimi_k2" not in transformers.CONFIG_MAPPING and models.AS["kimi_k2"] in NAMED
    with pytest.raises(NotImplementedError, match="do not go through transformers' experts"):
        model = transformers.AutoModelForCausalLM.from_config(small("llama4").get_text_config())
        moelora_hf.enable(model)
