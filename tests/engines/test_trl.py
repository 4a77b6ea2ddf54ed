"""`PushesAdapters`: TRL's generation with vLLM gets factors, and names their version."""

import importlib.util
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import config
from stand_in import modules
from test_vllm_update import serves_products, vllm_update  # noqa: F401
from transformers import AutoModelForCausalLM
from vllm_stand_in_engine import LLMEngine
from vllm_stand_in_lora import LINEAR, PROJECTIONS, E, I, K

from moelora.integrations.peft import engine_tensors

pytest_plugins = ["vllm_fixtures"]

INSTALLED = importlib.util.find_spec("trl") is not None
if INSTALLED:
    importlib.import_module("trl.generation.vllm_generation")  # before the stand-in of vLLM
needs_trl = pytest.mark.skipif(not INSTALLED, reason="TRL is not installed")
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"target_modules": [LINEAR], "target_parameters": STACKS, "init_lora_weights": False}
LORA |= {"r": 4, "lora_alpha": 12}


class LLM:
    """vLLM's, with the options that TRL gives it."""

    def __init__(self, model, enable_lora=False, max_loras=0, max_lora_rank=16, **options):
        self.options = {"enable_lora": enable_lora, "max_lora_rank": max_lora_rank} | options
        self.llm_engine = LLMEngine(1, max_loras, max_loras)
        self.seen = []

    def generate(self, prompts, sampling_params=None, use_tqdm=True, lora_request=None):
        self.seen.append(lora_request)
        return []


class VLLMGeneration:
    """As much of TRL 1.16's as the mixin meets."""

    def __init__(self, model, accelerator, processing_class, mode="colocate", **options):
        self.model, self.mode = model, mode
        self._dist = SimpleNamespace(gather_params=lambda parameters: nullcontext())
        if mode == "colocate":
            place = __import__("trl.generation.vllm_generation").generation.vllm_generation
            self.llm = place.LLM(model=model.name_or_path, **options)

    def sync_weights(self):
        raise AssertionError("the whole model is sent")

    def generate(self, prompts, images=None, num_generations=1):
        self.llm.generate(prompts, sampling_params=None, use_tqdm=False)


class Trainer:
    """GRPOTrainer, as far as its generation goes."""

    def __init__(self, model, use_vllm=True, **options):
        from trl.generation import vllm_generation as place

        self.model = model
        if use_vllm:
            accelerator = SimpleNamespace(
                num_processes=1,
                process_index=0,
                local_process_index=0,
                wait_for_everyone=lambda: None,
                state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
                distributed_type=None,
            )
            self.vllm_generation = place.VLLMGeneration(model, accelerator, None, **options)

    def generate(self):
        self.vllm_generation.sync_weights()
        self.vllm_generation.generate([[1, 2]], None, 1)


@pytest.fixture(params=["stand-in", pytest.param("trl", marks=needs_trl)])
def trainer(served, request, monkeypatch):
    """Makes trainers with the mixin."""
    if request.param == "stand-in":
        found = {"trl.generation.vllm_generation": {"VLLMGeneration": VLLMGeneration}}
        for name, module in modules(found).items():
            monkeypatch.setitem(sys.modules, name, module)
    from trl.generation import vllm_generation as place

    monkeypatch.setattr(place, "LLM", LLM, raising=False)
    if request.param == "trl":
        monkeypatch.setattr(place, "is_vllm_available", lambda *a, **k: True)
        monkeypatch.setattr(place, "SamplingParams", SimpleNamespace, raising=False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "0")
    from moelora.integrations.trl import PushesAdapters

    return type("Ours", (PushesAdapters, Trainer), {})


def model(**options):
    sizes = {"hidden_size": K, "moe_intermediate_size": I, "num_experts": E, "head_dim": K // 4}
    torch.manual_seed(0)
    made = config("qwen3_moe", mlp_only_layers=[], **sizes)
    made = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    return get_peft_model(made, LoraConfig(**LORA | options))


def deltas(peft):
    """What PEFT adds to weights, by the names of single experts."""

    def weights():
        parts = {LINEAR: peft.get_submodule(f"base_model.model.{LINEAR}").base_layer.weight}
        for name, module in peft.named_modules():
            if hasattr(module, "gate_up_proj") and hasattr(module, "has_gate"):
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                for e in range(E):
                    gate, up = module.gate_up_proj[e].chunk(2)
                    for n, w in zip(PROJECTIONS, (gate, module.down_proj[e], up), strict=True):
                        parts[f"{name}.{e}.{n}"] = w
        return {name: w.detach().clone() for name, w in parts.items()}

    before = weights()
    peft.merge_adapter()
    after = weights()
    peft.unmerge_adapter()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize(
    ("options", "tensors"),
    [
        ({}, 2 + 2 * 2 * 2),
        ({"alpha_pattern": {LINEAR: 5}}, 2 + 2 * 2 * 3 * E),
        ({"alpha_pattern": {LINEAR: 5}, "target_parameters": None}, 2),
    ],
    ids=["stacks", "pairs", "no experts"],
)
def test_factors_are_pushed_and_each_generation_names_its_version(trainer, options, tensors):
    """The model is neither merged nor sent; the engine has what PEFT computes."""
    made = trainer(model(**options))
    assert len(engine_tensors(made.model)[1]) == tensors
    llm = made.vllm_generation.llm
    assert llm.options["enable_lora"] and llm.options["max_lora_rank"] == 8
    made.generate()
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    made.generate()
    assert [request.lora_name for request in llm.seen] == ["policy@1", "policy@2"]
    engine = llm.llm_engine
    engine.add_request("a", llm.seen[1])
    serves_products(engine.step()["a"], deltas(made.model))


BAD = {
    "no LoRA": (lambda: model().get_base_model(), {}, "wanted one with LoRA"),
    "sleep": (model, {"enable_sleep_mode": True}, "vllm_enable_sleep_mode is True"),
    "no vLLM": (model, {"use_vllm": False}, 'vllm_mode="colocate"'),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_pushed_is_refused_as_the_trainer_is_made(trainer, bad):
    from trl.generation import vllm_generation as place

    make, options, why = BAD[bad]
    with pytest.raises(ValueError, match=why):
        trainer(make(), **options)
    assert place.LLM is LLM


DORA = {"use_dora": True, "target_parameters": None}


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, DORA])
def test_an_adapter_that_engines_cannot_read_is_named(trainer, options):
    made = trainer(model(**options))
    with pytest.raises((ValueError, NotImplementedError)):
        made.generate()
    assert made.lora_request is None
