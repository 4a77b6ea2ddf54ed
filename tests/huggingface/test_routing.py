"""A trainer's forward takes the experts that the sampler took, with weights of its own router."""

import copy

import pytest
import torch
from hf_models import MODELS, TARGETS, make_model, peft

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as mt
from moelora.training import LoraSlot, set_adapters

ROWS, PROMPT, NEW = 3, 5, 4


def load(config):
    model = make_model(config).requires_grad_(False)
    model.set_experts_implementation("moelora")
    return model


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "has_gate")]


def sampled(model):
    """Tokens of `generate`, and the experts that they took."""
    prompt = torch.randint(1, 60, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    with mt.record_routing(model, ROWS) as routing:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokens, routing.ids()


def another(model):
    """A trainer whose hidden states are others, so that its routers would choose others."""
    trainer = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "self_attn" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return trainer


def calls_of(experts):
    """What these modules are called with from now on, and what they return."""
    found = []
    for module in experts:
        module.register_forward_hook(lambda *call: found.append(call))
    return found


@pytest.mark.parametrize("config", MODELS)
def test_layers_differ_in_no_bit(config):
    model = load(config)
    tokens, ids = sampled(model)
    sampler, layers = experts_of(model), len(experts_of(model))
    assert ids.shape[:3] == (ROWS, PROMPT + NEW - 1, layers)
    trainer = another(model)
    with mt.record_routing(trainer, ROWS) as own:
        trainer(tokens)
    assert (own.ids()[:, :-1] != ids).any()
    calls = calls_of(experts_of(trainer))
    with mt.replay_routing(trainer, ids), mt.record_routing(trainer, ROWS) as taken:
        trainer(tokens)
    assert len(calls) == layers
    for layer, (module, (hidden, top_k, weights), out) in enumerate(calls):
        given = top_k.view(ROWS, -1, top_k.size(-1))
        assert torch.equal(given[:, :-1], ids[:, :, layer])
        assert torch.equal(sampler[layer](hidden, top_k, weights), out)
        assert module is not sampler[layer]
    assert torch.equal(taken.ids()[:, :-1], ids)
    with mt.record_routing(trainer, ROWS) as around, mt.replay_routing(trainer, ids):
        trainer(tokens)
    assert torch.equal(around.ids()[:, :, :1], own.ids()[:, :, :1])


@pytest.mark.parametrize("config", MODELS)
def test_what_it_chose_itself_changes_no_bit(config):
    model = load(config)
    tokens, _ = sampled(model)
    wanted = model(tokens).logits
    with mt.record_routing(model, ROWS) as routing:
        model(tokens)
    ids = routing.ids()
    every = ids.new_full((*ids.shape[:2], model.config.num_hidden_layers, ids.size(3)), 99)
    layers = enumerate(model.model.layers)
    every[:, :, [n for n, layer in layers if hasattr(layer.mlp, "experts")]] = ids
    of_vllm = list(every.to(torch.uint8).numpy())
    for given in (ids, ids[:, :2], list(ids.int().numpy()), of_vllm):
        with mt.replay_routing(model, given):
            assert torch.equal(model(tokens).logits, wanted)
    assert torch.equal(model(tokens).logits, wanted)


def multi(model):
    mt.multi_lora(model, slots=1, max_rank=4)
    LoraSlot(model, 0).open(rank=4)
    set_adapters(model, torch.zeros(1, dtype=torch.int32))
    return model


def wrapped(model):
    model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=TARGETS))
    moelora_peft.attach(model)
    return model


@pytest.mark.parametrize("make", [multi, wrapped, lambda model: model])
def test_gradients_reach_adapters_and_routers(make):
    """Of a model with slots, of one of PEFT, and of the router's weight."""
    _, ids = sampled(load("qwen3_moe"))
    trainer = make(another(load("qwen3_moe")))
    routers = [p for name, p in trainer.named_parameters() if "mlp.gate." in name]
    for weight in routers:
        weight.requires_grad_()
    tokens = torch.randint(1, 60, (ROWS, ids.size(1)), generator=torch.Generator().manual_seed(2))
    with mt.replay_routing(trainer, ids):
        trainer(tokens).logits.square().mean().backward()
    trained = [p for p in trainer.parameters() if p.requires_grad]
    assert routers and all(p.grad is not None for p in trained)
    assert all(weight.grad.any() for weight in routers)


BAD = {
    "shape": (lambda ids: ids[..., 0], "ids is .* wanted integers .rows, tokens, 1 layers, top_k"),
    "layers": (lambda ids: torch.cat([ids] * 3, 2), "1 layers, top_k"),
    "floats": (lambda ids: ids.float(), "of float32, wanted integers"),
    "rows": (lambda ids: ids[:2], "ids is of 2 rows of 8 tokens"),
    "tokens": (lambda ids: torch.cat([ids, ids], 1), "ids is of 3 rows of 16 tokens"),
    "top_k": (lambda ids: ids[..., :2], "with 2 experts each, and the forward has 27 tokens with"),
    "expert": (lambda ids: ids + 60, "ids has expert 6. of"),
    "None": (lambda ids: [None] * ROWS, "None, .* enable_return_routed_experts"),
    "rows of floats": (lambda ids: list(ids.float()), "of float32, .* wanted integers .tokens"),
    "no rows": (lambda ids: [], "ids is empty"),
    "0 rows": (lambda ids: ids[:0], "ids is .0, 8, 1, 3. of int64, wanted integers"),
    "several top_k": (lambda ids: [*ids[:2], ids[2, ..., :1]], "ids has .*wanted integers"),
}


@pytest.mark.parametrize("bad", BAD)
def test_other_routing_is_refused(bad):
    model = load("qwen3_moe")
    tokens, ids = sampled(model)
    change, why = BAD[bad]
    wanted = model(tokens).logits
    with pytest.raises(ValueError, match=why), mt.replay_routing(model, change(ids)):
        model(tokens)
    assert torch.equal(model(tokens).logits, wanted)


def test_rows_that_tokens_do_not_divide_into_are_not_recorded():
    model = load("qwen3_moe")
    tokens, _ = sampled(model)
    with mt.record_routing(model, 2) as routing:
        with pytest.raises(ValueError, match="rows is 2, and the forward has 27 tokens"):
            model(tokens)
    with pytest.raises(ValueError, match="no forward was recorded"):
        routing.ids()


def test_a_router_that_does_not_call_topk_is_refused(monkeypatch):
    model = load("qwen3_moe")
    block = next(m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "gate"))
    take = block.gate.forward
    ids = take(torch.randn(2, model.config.hidden_size))[2]
    monkeypatch.setattr(block.gate, "forward", lambda x: (None, torch.ones(2, 3), ids))
    with pytest.raises(RuntimeError, match="called torch.topk of its experts 0 times, wanted once"):
        with mt.record_routing(model, 1):
            model(torch.tensor([[1, 2]]))
    with (
        pytest.raises(ValueError, match="Linear has no experts"),
        mt.record_routing(torch.nn.Linear(2, 2), 1),
    ):
        pass
