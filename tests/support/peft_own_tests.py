"""Pytest plugin: PEFT's own tests of `target_parameters`, offline, on models attached to moelora.

The models of the hub that they load are made here, small and with random numbers, in a cache that
huggingface_hub reads offline. `attach` follows every call that makes a PEFT model with experts;
MOELORA_ATTACH=0 leaves it out. MOELORA_ARCHITECTURE names what they get in place of gpt-oss.
"""

import functools
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

CACHE = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_CACHE": CACHE.name, "HF_HUB_OFFLINE": "1"}

import peft  # noqa: E402  reads the environment
import pytest  # noqa: E402
import small_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from moelora.integrations.peft import attach  # noqa: E402
from moelora.integrations.transformers.projection import is_experts  # noqa: E402

# What the tests import and these models do not need.
for name, missing in {"datasets": "load_dataset", "diffusers": "StableDiffusionPipeline"}.items():
    if find_spec(name) is None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, missing, type(missing, (), {}))
        sys.modules[name] = module

# The tests target experts of layers 0 and 1, and q_proj.
ALL_EXPERTS = {
    "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v3": {"first_k_dense_replace": 0, "q_lora_rank": None},
    "glm4_moe": {"first_k_dense_replace": 0},
}
OTHERS = {
    "llama": {"intermediate_size": 40},
    "llama4_text": {"intermediate_size": 24, "intermediate_size_mlp": 40, "head_dim": 8}
    | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
}


def save(repo, architecture, dtype):
    """A model in the cache, as if it had been downloaded."""
    if architecture in OTHERS:
        sizes = small_models.SIZES | OTHERS[architecture]
        config = transformers.AutoConfig.for_model(architecture, **sizes | {"vocab_size": 128})
    else:
        more = ALL_EXPERTS.get(architecture, {})
        config = small_models.config(architecture, **more, vocab_size=128)
    commit, folder = "0" * 40, Path(CACHE.name, "models--" + repo.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / "snapshots" / commit)


ARCHITECTURE = os.environ.get("MOELORA_ARCHITECTURE", "gpt_oss")
save("trl-internal-testing/tiny-GptOssForCausalLM", ARCHITECTURE, torch.bfloat16)
save("trl-internal-testing/tiny-Llama4ForCausalLM", "llama4_text", torch.float32)
save("hf-internal-testing/tiny-random-LlamaForCausalLM", "llama", torch.float32)


def attaching(make):
    @functools.wraps(make)
    def wrapped(*args, **kwargs):
        model = make(*args, **kwargs)
        if any(map(is_experts, model.modules())):  # not of Llama 4
            attach(model, max_loras=4, max_rank=32)
        return model

    return wrapped


if os.environ.get("MOELORA_ATTACH") != "0":
    peft.get_peft_model = attaching(peft.get_peft_model)
    peft.PeftModel.from_pretrained = attaching(peft.PeftModel.from_pretrained)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """They ask the hub when a model is loaded for the first time."""
    for name, module in list(sys.modules.items()):
        if name.endswith(".testing_utils") and hasattr(module, "_HUB_MODEL_ACCESSES"):
            every = [folder.name[8:].replace("--", "/") for folder in Path(CACHE.name).iterdir()]
            monkeypatch.setattr(module, "_HUB_MODEL_ACCESSES", dict.fromkeys(every, 1))
