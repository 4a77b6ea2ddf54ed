"""Small transformers models of every kind of experts, and PEFT as the oracle of their adapters."""

import copy

import pytest
import small_models
import torch
from conftest import on_gpu

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def deepseek_v2():
    # Releases without a router of its own cannot run their group-limited routing.
    works = hasattr(transformers.models.deepseek_v2.modeling_deepseek_v2, "DeepseekV2TopkRouter")
    method = "group_limited_greedy" if works else "greedy"
    sizes = small_models.SIZES | small_models.MODELS["deepseek_v3"]
    return transformers.DeepseekV2Config(**sizes, topk_method=method)


def config_of(config):
    """What a function makes, or the configuration of a small model of a type."""
    return config() if callable(config) else small_models.config(config)


def one_layer(config):
    """`config` with one layer, of experts: compilers trace each layer anew."""

    def shorter():
        made = config_of(config)
        made.num_hidden_layers = 1
        made.mlp_only_layers, made.first_k_dense_replace = [], 0
        return made

    return shorter


MODELS = ["mixtral", "qwen3_moe", "gpt_oss", deepseek_v2, "deepseek_v3"]
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROWS = ["a", None, "b", "a", "c"]


# Where a model runs, and in what; there is no float32 on CUDA.
PLACES = [
    pytest.param(("cpu", torch.float32), id="cpu-float32"),
    pytest.param(("cpu", torch.bfloat16), id="cpu-bfloat16"),
    on_gpu(("cuda", torch.bfloat16), id="cuda-bfloat16"),
]


def make_model(config, dtype=torch.float32, device="cpu"):
    """A model whose experts and routers are large enough to matter in the logits."""
    made = small_models.filled(transformers.AutoModelForCausalLM, config_of(config))
    return made.to(device, dtype)


def tokens(rows=5, length=7, device="cpu"):
    return small_models.tokens(rows, length).to(device)


def save_adapter(model, folder, seed, **options):
    """Lets PEFT make and save an adapter with random factors; returns the folder."""
    torch.manual_seed(seed)
    defaults = {"r": 4, "lora_alpha": 8, "target_parameters": TARGETS, "target_modules": []}
    config = peft.LoraConfig(init_lora_weights=False, **defaults | options)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(2)
    wrapped.create_or_update_model_card = lambda folder: None  # a page that nothing reads
    wrapped.save_pretrained(folder)
    return folder


ADAPTERS = {
    "a": {"r": 4, "lora_alpha": 8},
    "b": {"r": 8, "lora_alpha": 8, "use_rslora": True},
    "c": {"r": 3, "lora_alpha": 6, "rank_pattern": {"experts.down_proj": 5}},
}
ADAPTERS["c"]["alpha_pattern"] = {"experts.gate_up_proj": 4}


def save_adapters(model, folder, adapters=ADAPTERS, **common):
    """Save an adapter with each of these options; returns {name: folder}."""
    each = enumerate(adapters.items())
    return {n: save_adapter(model, folder / n, seed, **common | of) for seed, (n, of) in each}


def with_peft(model, folder):
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def peft_of(model, folders):
    """PEFT's model with all of these adapters."""
    first, *others = folders
    model = peft.PeftModel.from_pretrained(model, folders[first], adapter_name=first)
    for name in others:
        model.load_adapter(folders[name], adapter_name=name)
    return model.eval()


@torch.no_grad()
def oracle(model, folders, rows, ids, adapted=with_peft):
    """Logits of a mixed batch, one adapter at a time, through transformers' own experts."""
    logits = model(ids).logits
    for name, folder in folders.items():
        chosen = [i for i, row in enumerate(rows) if row == name]
        if chosen:
            logits[chosen] = adapted(model, folder)(ids).logits[chosen]
    return logits


def assert_logits(got, wanted, naive):
    """Fail unless `got` is as close to `wanted`, of the same model in float32, as `naive` is.

    Where the model itself is not in float32 the rule is for the median token of each row, since a
    router may flip between two nearly equal experts.
    """
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
        return
    ours, theirs = ((x.float() - wanted).abs().mean(-1) for x in (got, naive))  # of each token
    assert (ours.median(-1).values <= 2 * theirs.median()).all(), (ours, theirs)
