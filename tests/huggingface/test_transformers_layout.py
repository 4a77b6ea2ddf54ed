"""Experts that are stored as (E, in, out): laid out once in place, and never served from a copy."""

import copy
import io

import pytest
import torch
from hf_models import make_model, one_layer, tokens
from threads import run_threads

import moelora.integrations.transformers as moelora_hf
from moelora.operators import experts as ops

pytestmark = pytest.mark.usefixtures("no_grad")

NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture
def model():
    model = make_model("gpt_oss")
    model.set_experts_implementation("moelora")
    return model


@torch.no_grad()
def logits(model, implementation="moelora"):
    model.set_experts_implementation(implementation)
    return model(tokens()).logits


def assert_is_eager(model, before):
    """moelora's answer is that of transformers' own experts, and another one than before."""
    got, wanted = logits(model), logits(model, "eager")
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(got, before, atol=1e-2)


def parameters(model):
    """(experts module, name, parameter) of every layer."""
    for experts, _ in moelora_hf.moe_layers(model).values():
        for name in NAMES:
            yield experts, name, getattr(experts, name)


def test_parameters_keep_everything_but_their_strides(model, monkeypatch):
    untouched = copy.deepcopy(model)
    wanted = {i: logits(untouched, i) for i in ("eager", "grouped_mm", "batched_mm")}
    before = [p for *_, p in parameters(model)]
    seen = []
    fused = ops.fused_experts_lora

    def spy(hidden_states, w13, w2, *args, **kwargs):
        seen.extend([w13.data_ptr(), w2.data_ptr()])
        return fused(hidden_states, w13, w2, *args, **kwargs)

    monkeypatch.setattr(ops, "fused_experts_lora", spy)
    logits(model)
    after = list(parameters(model))
    for (*_, now), then, (*_, original) in zip(after, before, parameters(untouched), strict=True):
        assert now is then
        assert torch.equal(now, original)
        assert now.transpose(1, 2).is_contiguous()
        assert now.untyped_storage().nbytes() == original.untyped_storage().nbytes()
    # The operator reads the parameters themselves: there is no second set of weights.
    assert seen == [p.data_ptr() for *_, p in after]
    logits(model)
    assert seen[len(after) :] == seen[: len(after)], "laid out once"
    for implementation, values in wanted.items():
        got = logits(model, implementation)
        torch.testing.assert_close(got, values, rtol=2e-4, atol=2e-4)


def assign(weight, values):
    weight.data = values.contiguous()


WRITES = {
    "in place": lambda weight, values: weight.copy_(values),
    "in place through data": lambda weight, values: weight.data.copy_(values),
    "to data": assign,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_seen(model, write):
    for _ in range(2):
        for _, _, weight in parameters(model):
            before = logits(model)
            with torch.no_grad():
                write(weight, weight * -1.5)
            assert_is_eager(model, before)


def test_new_parameters_are_seen(model):
    for assign in (False, True):
        before = logits(model)
        state = {key: value * -1 for key, value in model.state_dict().items() if "experts" in key}
        state = {key: value.contiguous() for key, value in state.items()}
        model.load_state_dict(state, strict=False, assign=assign)
        assert_is_eager(model, before)
    before = logits(model)
    for experts, name, weight in list(parameters(model)):
        setattr(experts, name, torch.nn.Parameter(-weight.detach()))
    assert_is_eager(model, before)
    before = logits(model)
    model.to(torch.float64).to(torch.float32)
    assert torch.equal(logits(model), before)


def test_saving_and_copying(model, tmp_path):
    wanted = logits(model)
    state = model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again = make_model("gpt_oss")
    again.load_state_dict(torch.load(buffer))
    for other in (loaded, copy.deepcopy(model), again):
        assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())
        assert torch.equal(logits(other), wanted)
        for (*_, theirs), (*_, ours) in zip(parameters(other), parameters(model), strict=True):
            assert theirs.data_ptr() != ours.data_ptr()


def test_threads_that_come_first_together():
    ids = tokens()
    untouched = make_model("gpt_oss")
    wanted = logits(untouched)
    untouched = make_model("gpt_oss")
    untouched.set_experts_implementation("moelora")
    for _ in range(20):
        model = copy.deepcopy(untouched)
        for got in run_threads(lambda _, m=model: m(ids).logits, 4):
            assert torch.equal(got, wanted)


def test_compiled():
    """Without a graph break, and a parameter in other strides is laid out again."""
    torch.compiler.reset()
    model = make_model(one_layer("gpt_oss"))
    wanted = logits(model, "eager")
    model.set_experts_implementation("moelora")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(tokens()).logits, wanted, rtol=1e-4, atol=1e-4)
        for _, _, weight in parameters(model):
            assert weight.transpose(1, 2).is_contiguous()
            weight.data = -weight.data.contiguous()
        wanted = logits(copy.deepcopy(model), "eager")


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("called_in", [True, False])
def test_inference_mode(made_in, called_in):
    wanted = logits(make_model("gpt_oss"))
    with torch.inference_mode(made_in), torch.no_grad():
        model = make_model("gpt_oss")
    model.set_experts_implementation("moelora")
    with torch.inference_mode(called_in), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(tokens()).logits, wanted)
    assert model.lm_head.weight.is_inference() == made_in
