"""PEFT models whose experts are attached while they are trained: gradients in PEFT's parameters."""

import copy

import pytest
import torch
from covering import extent
from hf_models import MODELS, TARGETS, make_model, one_layer, peft, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

CONFIG = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
CONFIG |= {"target_modules": ["q_proj"], "target_parameters": TARGETS}


def adapted(model, **options):
    """A PEFT model with an adapter to train, of attention and of experts."""
    torch.manual_seed(3)
    options = CONFIG | options
    cast = options.pop("autocast_adapter_dtype", True)
    config = peft.LoraConfig(**options)
    model = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=cast)
    return model.train()


def both(model, **options):
    """PEFT's model, and one that is attached."""
    theirs, ours = adapted(model, **options), adapted(model, **options)
    moelora_peft.attach(ours)
    return theirs, ours


def gradients(model, ids, **kwargs):
    """By parameter, in float32."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, **kwargs).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "experts" in n}
    return {n: p.grad.float() for n, p in trained.items()}


def assert_alike(found, wanted, naive=None, factor=2.0):
    """As close to `wanted` as `naive` is, or, without one, as float32 allows."""
    assert found.keys() == wanted.keys() and len(found) > 0
    for name, want in wanted.items():
        scale = want.abs().max()
        assert scale > 0, name
        error = (found[name] - want).abs().max()
        limit = 1e-4 * scale if naive is None else factor * (naive[name] - want).abs().max()
        assert error <= limit + 1e-5 * scale, (name, error, limit, scale)


OPTIONS = {
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"experts.down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 5},
    },
    "gate_up": {"target_parameters": TARGETS[:1]},
    "down": {"target_parameters": TARGETS[1:]},
    "experts_alone": {"target_modules": []},
}


@pytest.mark.parametrize(
    ("config", "options"), [*((each, None) for each in MODELS), *(("mixtral", o) for o in OPTIONS)]
)
def test_gradients_are_those_of_peft(config, options):
    ids = tokens()
    theirs, ours = both(make_model(config), **OPTIONS.get(options, {}))
    assert_alike(gradients(ours, ids), gradients(theirs, ids))
    assert all(type(p) is torch.nn.Parameter for p in ours.parameters())


class Calls(TorchDispatchMode):
    """Counts calls of torch's operators, which is host time that does not depend on the machine."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cast", [True, False], ids=["float32-factors", "bfloat16-factors"])
def test_a_layer_makes_few_calls(cast):
    """One adapter needs no stack: A is a view of PEFT's parameter, B one copy."""
    model = adapted(make_model(one_layer("qwen3_moe")).bfloat16(), autocast_adapter_dtype=cast)
    moelora_peft.attach(model)
    experts = model.base_model.model.model.layers[0].mlp.experts
    hidden = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((3, 2), 0.5, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.tensor([[0, 1]] * 3)
    with Calls() as forward:
        out = experts(hidden, ids, weights)
    with Calls() as backward:
        out.backward(hidden)
    assert forward.count <= 13
    assert backward.count <= 16


@pytest.mark.parametrize("cast", [True, False], ids=["float32-factors", "bfloat16-factors"])
def test_gradients_of_a_16_bit_model(cast):
    """PEFT keeps factors in float32 beside it, unless it is told not to."""
    model, ids = make_model("mixtral", torch.bfloat16), tokens()
    options = {"autocast_adapter_dtype": cast, "target_modules": []}
    theirs, ours = both(model, **options)
    exact = copy.deepcopy(theirs).float()
    dtypes = {p.dtype for n, p in ours.named_parameters() if "lora" in n}
    assert dtypes == {torch.float32 if cast else torch.bfloat16}
    wanted, naive, found = (gradients(m, ids) for m in (exact, theirs, ours))
    assert_alike(found, wanted, naive, factor=3.0)


# The same trace of both directions; the second one also decomposes it, and saves less for backward.
BACKENDS = ["aot_eager", "aot_eager_decomp_partition"]


@pytest.mark.parametrize("config", extent(nightly=["mixtral", "gpt_oss"], ci=["gpt_oss"]))
@pytest.mark.parametrize("backend", extent(nightly=BACKENDS, ci=BACKENDS[1:]))
def test_compiled(backend, config):
    torch._dynamo.reset()
    model, ids = make_model(one_layer(config)), tokens()
    ours = adapted(model)
    moelora_peft.attach(ours)
    compiled = torch.compile(ours, backend=backend)
    compiled(ids, labels=ids).loss.backward()  # first, before the experts have run
    found = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad and "experts" in n}
    assert_alike(found, gradients(ours, ids))
    ours.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(ids).logits, ours(ids).logits)
            for name, parameter in ours.named_parameters():
                if "lora_" in name:
                    parameter.data.mul_(1.25)
    ours.train()
    wanted = gradients(ours, ids)
    ours.zero_grad(set_to_none=True)
    compiled(ids, labels=ids).loss.backward()
    assert_alike({n: p.grad for n, p in ours.named_parameters() if n in wanted}, wanted)


def test_adapters_of_one_model():
    """Only the active one is trained; the base model alone gives no adapter a gradient."""
    model, ids = make_model("mixtral"), tokens()
    theirs, ours = adapted(model), adapted(model)
    for each in (theirs, ours):
        torch.manual_seed(11)
        each.add_adapter("second", peft.LoraConfig(**CONFIG | {"r": 2}))
        each.set_adapter("second")
    moelora_peft.attach(ours)
    found, wanted = gradients(ours, ids), gradients(theirs, ids)
    assert all(".second." in name for name in found)
    assert_alike(found, wanted)
    ours.set_adapter("default")
    theirs.set_adapter("default")
    assert_alike(gradients(ours, ids), gradients(theirs, ids))
    x = ours.get_input_embeddings()(ids).detach().requires_grad_()
    ours.zero_grad(set_to_none=True)
    with ours.disable_adapter():
        ours(inputs_embeds=x, labels=ids).loss.backward()
    assert x.grad.any() and all(p.grad is None for p in ours.parameters())


def test_rows_of_different_adapters():
    """In one step, each adapter has the gradients that it has when it trains alone."""
    model, ids = make_model("mixtral"), tokens(rows=6)
    names = ["default", "second", "__base__", "second", "default", "default"]
    ours = adapted(model, target_modules=[])
    torch.manual_seed(11)
    ours.add_adapter("second", peft.LoraConfig(**CONFIG | {"r": 6, "target_modules": []}))
    moelora_peft.attach(ours)
    ours.eval()  # PEFT takes adapter_names there alone
    trained = {n: p for n, p in ours.named_parameters() if "lora_" in n}

    def losses(rows, **kwargs):
        for parameter in trained.values():
            parameter.requires_grad_()
            parameter.grad = None
        logits = ours(ids[rows], **kwargs).logits
        logits.float().square().sum().backward()
        return {n: p.grad for n, p in trained.items() if p.grad is not None}

    together = losses(range(6), adapter_names=names)
    for adapter in ("default", "second"):
        rows = [i for i, name in enumerate(names) if name == adapter]
        ours.set_adapter(adapter)
        alone = {n: g for n, g in losses(rows).items() if f".{adapter}." in n}
        assert len(alone) == 8
        for name, grad in alone.items():
            torch.testing.assert_close(together[name], grad, rtol=1e-4, atol=1e-4)


def test_what_is_served_is_not_trained(tmp_path):
    """An adapter that is loaded for inference is read from the pool, under grad mode as well."""
    model, ids = make_model("mixtral"), tokens()
    adapted(model).save_pretrained(tmp_path)
    served = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    pool = moelora_peft.attach(served)
    x = served.get_input_embeddings()(ids).detach().requires_grad_()
    served(inputs_embeds=x).logits.square().mean().backward()
    assert x.grad.any() and "default" in pool
    trainable = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path, is_trainable=True)
    pool = moelora_peft.attach(trainable.train())
    assert len(gradients(trainable, ids)) == 8 and "default" not in pool


def test_detached_it_trains_as_before():
    model, ids = make_model("mixtral"), tokens()
    ours = adapted(model)
    wanted = gradients(ours, ids)
    before = ours.get_experts_implementation()
    assert before[""] != "moelora"
    for _ in range(2):
        moelora_peft.attach(ours)
    moelora_peft.detach(ours)
    assert ours.get_experts_implementation() == before
    moelora_peft.attach(ours)
    ours.set_experts_implementation("eager")
    moelora_peft.detach(ours)
    assert ours.get_experts_implementation() == {"": "eager"}, "chosen since"
    assert_alike(gradients(ours, ids), wanted)


def test_biases_of_experts_are_no_targets():
    model = adapted(make_model("gpt_oss"), target_parameters=["mlp.experts.gate_up_proj_bias"])
    with pytest.raises(ValueError, match="gate_up_proj_bias is targeted, but"):
        moelora_peft.attach(model)


def test_factors_whose_storage_was_freed():
    """As by FSDP and offloading: torch's own operators would read address 0."""
    model, ids = adapted(make_model("qwen3_moe")), tokens()
    moelora_peft.attach(model)
    factor = next(p for n, p in model.named_parameters() if "experts" in n and "lora_B" in n)
    factor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"lora_B.default of \w+ has elements .* it was freed"):
        model(ids)
    moelora_peft.detach(model)
    with pytest.raises(ValueError, match=r"experts.*lora_B.default.weight has elements .* freed"):
        moelora_peft.attach(model.eval())


# ---- without PEFT ----


def test_the_base_model_passes_gradients_on():
    """Experts that are enabled for training are frozen; embeddings, norms and routers learn."""
    model, ids = make_model("qwen3_moe"), tokens()
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"gate_up_proj requires a gradient.*training=True"):
        ours.set_experts_implementation("moelora")
        ours(ids)
    moelora_hf.enable(ours, training=True)
    for each in (theirs, ours):
        each(ids, labels=ids).loss.backward()
    checked = 0
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if ".experts." in name:
            assert not p.requires_grad and p.grad is None
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
            checked += name.endswith("gate.weight")
    assert checked > 0
