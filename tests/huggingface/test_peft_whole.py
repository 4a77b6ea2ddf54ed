"""Attached PEFT models whose adapters are not of experts alone: mixed batches, and lost factors."""

import copy

import pytest
import torch
from dialects import renamed, rewrite
from hf_models import (
    TARGETS,
    make_model,
    oracle,
    peft,
    peft_of,
    save_adapter,
    save_adapters,
    tokens,
)
from whole_models import make_whole_model, write_adapter

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),
]

ROUTER = "mlp.gate.weight"


# ---- mixed batches ----


@pytest.mark.parametrize("config", ["qwen2_moe", "qwen3_5_moe_text"])
def test_shared_experts_and_routers(config, tmp_path):
    model = make_model(config)
    ids = tokens()
    options = {
        "a": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]},
        "b": {"target_modules": "all-linear", "r": 6, "use_rslora": True},
        "c": {"target_modules": ["embed_tokens", "v_proj"], "rank_pattern": {"v_proj": 2}},
    }
    folders = save_adapters(model, tmp_path, options, target_parameters=[*TARGETS, ROUTER])
    rows = ["a", None, "b", "a", "c"]
    names = [row or "__base__" for row in rows]
    wanted = oracle(model, folders, rows, ids)
    served = copy.deepcopy(model)
    moelora_hf.load_adapters(served, folders)
    model = peft_of(model, folders)
    moelora_peft.attach(model)
    for each in (served, model):
        got = each(ids, adapter_names=names).logits
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(got[1], served(ids).logits[1]), "base rows keep their bits"

    options = {"input_ids": ids, "max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    text = model.generate(adapter_names=names, **options)
    for name in "abc":
        model.set_adapter(name)
        alone = model.generate(**options)
        chosen = [i for i, row in enumerate(rows) if row == name]
        assert torch.equal(text[chosen], alone[chosen])


def test_layers_that_a_later_adapter_brings(tmp_path):
    model = make_model("qwen2_moe")
    ids = tokens(rows=2)
    options = {
        "first": {"target_modules": ["o_proj"]},
        "second": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    }
    folders = save_adapters(model, tmp_path, options)
    rows = ["first", "second"]
    wanted = oracle(model, folders, rows, ids)
    model = peft_of(model, {"first": folders["first"]})
    moelora_peft.attach(model, max_loras=2)
    model.load_adapter(folders["second"], adapter_name="second")
    got = model(ids, adapter_names=rows).logits
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    shared = model.base_model.model.model.layers[0].mlp.shared_expert.up_proj
    with pytest.raises(RuntimeError, match="3 inputs of a batch of None reached a Linear that 2"):
        shared(torch.zeros(3, 32), adapter_names=rows)
    moelora_peft.detach(model)
    assert "forward" not in shared.__dict__


# ---- what PEFT loses ----


def test_dropped_factors(tmp_path):
    """PEFT converts per-expert adapters of older classes, and forgets dense and shared layers."""
    model = make_whole_model("glm4_moe")
    folder = write_adapter(
        model,
        tmp_path / "a",
        1,
        lambda name: "mlp" in name and not name.endswith(".gate"),
        lora_dropout=0.0,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    )
    model = peft_of(model, {"a": folder})
    with pytest.raises(ValueError) as refused:
        moelora_peft.attach(model)
    assert "PEFT has dropped the factors of model.layers.0.mlp.down_proj" in str(refused.value)
    assert "load_adapters serves them" in str(refused.value)
    assert not hasattr(model.get_base_model(), "_moelora")


@pytest.mark.parametrize("how", ["PeftModel", "load_adapter"])
def test_factors_that_peft_does_not_find(how, tmp_path):
    model = make_model("mixtral")
    compiled = save_adapter(model, tmp_path / "compiled", 1, target_modules=["o_proj"])
    rewrite(compiled, renamed("self_attn", "self_attn._orig_mod"))
    if how == "PeftModel":
        model = peft_of(model, {"a": compiled})
    else:
        model.load_adapter(str(compiled), adapter_name="a")
    message = "PEFT has (dropped|left) the factors of model.layers.0.self_attn.o_proj"
    with pytest.raises(ValueError, match=message):
        moelora_peft.attach(model)


def test_another_order_of_columns(tmp_path):
    model = make_model("mixtral")
    plain = save_adapter(model, tmp_path / "plain", 1)
    marked = rewrite(save_adapter(model, tmp_path / "marked", 1), lora_B_layout="grouped_by_expert")
    model = peft_of(model, {"plain": plain})
    moelora_peft.attach(model, max_loras=2)
    model.load_adapter(marked, adapter_name="marked")  # is looked at when it is used
    with pytest.raises(ValueError, match="'marked': columns of lora_B are grouped by expert"):
        model(tokens(rows=2), adapter_names=["plain", "marked"])


def test_folders_that_are_not_known(tmp_path, monkeypatch):
    """Of adapters that were loaded before, or in some other way."""
    model = make_model("mixtral")
    folder = save_adapter(model, tmp_path / "a", 1, target_modules=["o_proj"])
    model = peft_of(model, {"a": folder})
    del model.__dict__["_moelora_loads"]
    moelora_peft.attach(model)
    moelora_peft.detach(model)
    lost = model.base_model.model.model.layers[1].self_attn.o_proj.lora_B["a"].weight
    lost.zero_()
    with pytest.raises(ValueError, match=r"'a': model.layers.1.self_attn.o_proj have B = 0.*fold"):
        moelora_peft.attach(model)
    with pytest.raises(ValueError, match="PEFT has left the factors of model.layers.1.self_attn.o"):
        moelora_peft.attach(model, folders={"a": folder})
    fresh = peft.get_peft_model(
        make_model("mixtral"), peft.LoraConfig(target_parameters=TARGETS, target_modules=["o_proj"])
    )
    moelora_peft.attach(fresh)  # not trained yet, in no layer
