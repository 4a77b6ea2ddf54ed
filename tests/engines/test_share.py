"""`share_experts`: a trainer's frozen experts are the tiles of vLLM's layers, in the same bits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Spec
from small_models import config
from transformers import AutoModelForCausalLM
from vllm_layer import Layer
from vllm_quantized import FP8, KINDS, Routed, quantized_layer
from vllm_stand_in_engine import LLMEngine

import moelora.integrations.transformers as mt
from moelora.training import LoraSlot, set_adapters

pytest_plugins = ["vllm_fixtures"]

BF16 = torch.bfloat16
SPEC = Spec(tokens=4, hidden=256, inter=128, experts=4, dtype=BF16, mix="absent")
EVERY = ["16 bits", "16 bits, swigluoai", *KINDS, *FP8]


def layer_of(vllm, kind, seed):
    """A layer of vLLM's model that has loaded its weights, and those as (E, N, K) of 16 bits."""
    gpt_oss = kind in ("gpt_oss", "16 bits, swigluoai")
    options = {"activation": "swigluoai", "bias": True, "slices": 1} if gpt_oss else {}
    spec = replace(SPEC, **options, seed=seed)
    if not kind.startswith("16 bits"):
        made = quantized_layer(vllm, kind, spec)
        return made.routed, (made.p.w13, made.p.w2)
    made = Layer(vllm, spec.build())
    routed = Routed(made.moe_config)
    for name, weight in (("w13", made.p.w13), ("w2", made.p.w2)):
        parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
        routed.register_parameter(f"{name}_weight", parameter)
    routed.quant_method = SimpleNamespace(moe_kernel=made.kernel)
    return routed, (made.p.w13, made.p.w2)


class Pair:
    """A trainer of two layers, and an engine of the same weights."""

    def __init__(self, vllm, kind):
        vllm.register()
        self.share = mt.share_experts
        gpt_oss = "gpt_oss" if kind in ("gpt_oss", "16 bits, swigluoai") else "qwen3_moe"
        sizes = {"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}
        sizes |= {"num_experts": 4, "num_local_experts": 4, "mlp_only_layers": []}
        torch.manual_seed(0)
        made = config(gpt_oss, **sizes)
        self.model = AutoModelForCausalLM.from_config(made, dtype=BF16).requires_grad_(False)
        self.layers = [module for module, _ in mt.moe_layers(self.model).values()]
        self.routed = []
        for seed, module in enumerate(self.layers):
            routed, (w13, w2) = layer_of(vllm, kind, seed)
            self.routed.append(routed)
            for parameter, weight in ((module.gate_up_proj, w13), (module.down_proj, w2)):
                stored = weight.transpose(1, 2) if module.is_transposed else weight
                parameter.data = stored.clone()
        self.engine = LLMEngine(1, 1, 1)
        self.engine.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=False)
        name = "model.layers.{}.mlp.experts.base_layer.routed_experts"
        found = [(name.format(n), module) for n, module in enumerate(self.routed)]
        self.inner = SimpleNamespace(named_modules=lambda: found)
        self.engine.workers[0].model = self.inner
        self.llm = SimpleNamespace(llm_engine=self.engine)

    def pointers(self):
        """Storages of the trainer's weights, and of the engine's."""
        ours = [w for m in self.layers for w in (m.gate_up_proj, m.down_proj)]
        ours = [getattr(w, "tiles", w) for w in ours]
        theirs = [w for r in self.routed for w in (r.w13_weight, r.w2_weight)]
        return [[w.untyped_storage().data_ptr() for w in of] for of in (ours, theirs)]


@pytest.fixture
def pair(vllm):
    return Pair(vllm, "16 bits")


def trained(model):
    """Logits, and gradients of an adapter's factors in every layer."""
    mt.enable(model)
    mt.multi_lora(model, slots=1, max_rank=4)
    slot = LoraSlot(model, 0).open(rank=4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for factor in slot.parameters():
            factor.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
    set_adapters(model, torch.tensor([0, 0]))
    draws = torch.Generator().manual_seed(5)
    logits = model(torch.randint(2, 61, (2, 7), generator=draws)).logits
    logits.float().square().mean().backward()
    return [logits, *(p.grad for p in slot.parameters())]


@pytest.mark.parametrize("kind", EVERY)
def test_a_trainer_on_shared_experts_has_the_bits_of_one_on_a_copy(vllm, kind):
    """From the same storages, of which nothing is left beside the engine's."""
    pair, copy = Pair(vllm, kind), Pair(vllm, kind)
    before = sum(w.nbytes for m in pair.layers for w in (m.gate_up_proj, m.down_proj))
    shared = pair.share(pair.model, pair.llm)
    assert shared.nbytes == before
    ours, theirs = pair.pointers()
    assert ours == theirs
    assert pair.share(pair.model, pair.llm).nbytes == 0
    copy.share(copy.model, copy.llm).undo()
    ours, theirs = copy.pointers()
    assert not {*ours} & {*theirs}
    for found, wanted in zip(trained(pair.model), trained(copy.model), strict=True):
        assert wanted.any() and torch.equal(found, wanted)


def test_a_trainer_need_not_load_its_experts(pair):
    for module in pair.layers:
        module.to("meta")
    assert pair.share(pair.model, pair.llm).nbytes == 0
    ours, theirs = pair.pointers()
    assert ours == theirs


@pytest.mark.parametrize("kind", ["16 bits", "fp8_block", "mxfp4"])
def test_a_model_of_peft_trains_on_shared_experts(vllm, kind):
    """As TRL has made it before there is an engine; `attach` comes after it."""
    from peft import LoraConfig, get_peft_model

    from moelora.integrations.peft import attach

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_parameters=parameters, init_lora_weights=False)
    found = []
    for copy in (False, True):
        pair = Pair(vllm, kind)
        torch.manual_seed(1)
        model = get_peft_model(pair.model, lora)
        shared = pair.share(model, pair.llm)
        if copy:
            shared.undo()
        assert (pair.pointers()[0] == pair.pointers()[1]) != copy
        attach(model)
        logits = model(torch.arange(2, 9)[None]).logits
        logits.float().square().mean().backward()
        found.append([logits, *(p.grad for p in model.parameters() if p.requires_grad)])
    for one, other in zip(*found, strict=True):
        assert one.any() and torch.equal(one, other)


def change(pair, **of):
    for path, value in of.items():
        place, name = pair, path
        while "__" in name:
            first, _, name = name.partition("__")
            place = place[int(first)] if first.isdigit() else getattr(place, first)
        setattr(place, name, value)


def added(pair):
    pair.routed[1].w2_weight.data[-1, 0, 0] += 1


def give_slots(pair):
    mt.multi_lora(pair.model, slots=1, max_rank=2)


CONFIG = "engine__vllm_config__"
SMALL = torch.nn.Parameter(torch.zeros(4, 256, 64))
BAD = {
    "ranks": ({f"{CONFIG}parallel_config__world_size": 2}, "has 2 ranks: .*tensor_parallel_size=1"),
    "process": ({"engine__engine_core": None}, "in another process: set VLLM_ENABLE_V1_MULTIPROC"),
    "sleep": ({f"{CONFIG}model_config__enable_sleep_mode": True}, "enable_sleep_mode=False"),
    "EPLB": ({f"{CONFIG}parallel_config__enable_eplb": True}, r"\(EPLB\): start it with enable"),
    "a layer less": ({"inner__named_modules": list}, "2 layers of experts and the engine 0"),
    "vLLM's kernels": (
        {"routed__1__quant_method": SimpleNamespace(moe_kernel=None)},
        "layers.1.mlp.experts is in the layout of vLLM's NoneType",
    ),
    "offloaded": ({"routed__1__w2_weight___vllm_is_uva_offloaded": True}, "are in host memory"),
    "shapes": ({"layers__1__down_proj": SMALL}, "give both the same checkpoint"),
    "order": ({"layers__1__is_concatenated": False}, "rows of gate and up in turns, unlike"),
    "dtype": (lambda pair: pair.layers[1].float(), "load the model with dtype=torch.bfloat16"),
    "trained": (lambda pair: pair.layers[1].requires_grad_(), "is trained: freeze it"),
    "other numbers": (added, "layers.1.mlp.experts has other numbers than the engine's"),
    "multi_lora": (give_slots, "call share_experts before multi_lora"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_shared_is_refused_before_anything_is(pair, bad):
    wrong, why = BAD[bad]
    wrong(pair) if callable(wrong) else change(pair, **wrong)
    before = pair.pointers()
    with pytest.raises(ValueError, match=why):
        pair.share(pair.model, pair.llm)
    assert pair.pointers() == before


def test_another_checkpoint_is_refused_though_the_engine_quantizes_it(vllm):
    pair = Pair(vllm, "fp8_block")
    pair.layers[0].gate_up_proj.data.normal_()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts has other numbers"):
        pair.share(pair.model, pair.llm)
