"""PEFT models whose experts are attached to moelora: mixed batches through PEFT's own interface."""

import copy
import gc
import pickle
import weakref

import hf_models
import pytest
import small_models
import torch
from hf_models import (
    ADAPTERS,
    MODELS,
    PLACES,
    ROWS,
    assert_logits,
    make_model,
    oracle,
    peft,
    peft_of,
    save_adapter,
    tokens,
    transformers,
    with_peft,
)
from packaging.version import Version

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")

NAMES = [row or "__base__" for row in ROWS]
OPTIONS = {
    "a": ADAPTERS["a"] | {"target_modules": ["o_proj"], "rank_pattern": {"o_proj": 6}},
    "b": ADAPTERS["b"] | {"target_modules": ["o_proj"]},
    "c": ADAPTERS["c"],
    "attention": {"target_modules": ["o_proj"], "target_parameters": None},
}


def save_adapters(model, folder, names="abc"):
    """The adapters of hf_models, two of them with factors of attention too."""
    return hf_models.save_adapters(model, folder, {name: OPTIONS[name] for name in names})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", MODELS)
def test_mixed_batch(config, place, tmp_path):
    """Served by `load_adapters`, and in PEFT's model, as PEFT has it one adapter at a time."""
    model = make_model(config, place[1], place[0])
    ids = tokens(length=16, device=model.device)
    folders = save_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    wanted, naive = (oracle(m, folders, ROWS, ids) for m in (exact, model))
    base = exact(ids).logits
    for i, row in enumerate(ROWS):
        difference = (wanted[i] - base[i]).abs().max()
        assert (difference > 0.1) == (row is not None), "an adapter must be seen in the logits"

    served = copy.deepcopy(model)
    pool = moelora_hf.load_adapters(served, folders)
    assert pool.names() == ["a", "b", "c"]
    assert pool.max_rank == 8
    with moelora_hf.use_adapters(served, ROWS):
        got = served(ids).logits
    assert_logits(got, wanted, naive)
    assert torch.equal(got[1], served(ids).logits[1]), "base rows keep their bits"

    model = peft_of(model, folders)
    pool = moelora_peft.attach(model)
    assert moelora_hf.pool(model) is pool
    assert pool.names() == ["a", "b", "c"]
    assert_logits(model(ids, adapter_names=NAMES).logits, wanted, naive)

    # What PEFT does without adapter_names.
    model.set_adapter("b")
    assert_logits(model(ids).logits[2], wanted[2], naive[2])
    with model.disable_adapter():
        base = model(ids).logits
    assert_logits(base[1], wanted[1], naive[1])
    assert torch.equal(model(ids, adapter_names=["__base__"] * 5).logits, base)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("qwen3_moe", {"moe_intermediate_size": 16}), ("gpt_oss", {"intermediate_size": 32})],
)
def test_square_parameters(model_type, sizes, tmp_path):
    """Whose shape does not say whether PEFT's factors are exchanged: the installed version does."""
    model, ids = make_model(lambda: small_models.config(model_type, **sizes)), tokens()
    experts = model.model.layers[1].mlp.experts
    sides = [parameter.shape[-2:] for parameter in (experts.gate_up_proj, experts.down_proj)]
    assert any(rows == columns for rows, columns in sides)
    folder = save_adapter(model, tmp_path / "a", 1)
    wanted = with_peft(model, folder)(ids).logits
    moelora_hf.load_adapters(model, [folder])
    got = model(ids, adapter_names=["a"] * len(ids)).logits
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 5]}],
    ids=["modules_to_save", "trainable_token_indices"],
)
def test_what_concerns_no_experts_stays_with_peft(options, tmp_path):
    model = make_model("mixtral")
    ids = tokens()
    folder = save_adapter(model, tmp_path / "a", 1, **ADAPTERS["a"], **options)
    model = with_peft(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save.default" in name or "trainable_tokens_delta" in name:
                parameter.add_(0.3)  # far from what the base model has
    wanted = model(ids).logits
    pool = moelora_peft.attach(model)
    assert pool.names() == ["default"]
    assert_logits(model(ids).logits, wanted, wanted)
    with model.disable_adapter():
        assert (model(ids).logits - wanted).abs().max() > 0.1


# The lowest PEFT that transformers' own `set_adapter` takes; of 5.24 it is not released yet.
LOWEST_PEFT = getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0")


@pytest.mark.skipif(
    Version(peft.__version__) < Version(LOWEST_PEFT),
    reason=f"transformers {transformers.__version__} asks for PEFT {LOWEST_PEFT}, "
    f"this is {peft.__version__}",
)
def test_a_model_that_loaded_its_adapters_itself(tmp_path, monkeypatch):
    # transformers 5.7 exchanges A and B in this for all models to come.
    wrapper = peft.tuners.lora.layer.ParamWrapper
    monkeypatch.setattr(wrapper, "update_layer", wrapper.update_layer)
    model = make_model("mixtral")
    ids = tokens()
    folders = save_adapters(model, tmp_path, "ab")
    wanted = {name: with_peft(model, folder)(ids).logits for name, folder in folders.items()}
    base = model(ids).logits
    with pytest.raises(ValueError, match="MixtralForCausalLM without adapters of PEFT"):
        moelora_peft.attach(model)
    for name, folder in folders.items():
        model.load_adapter(str(folder), adapter_name=name)
    pool = moelora_peft.attach(model)
    assert pool.names() == ["a", "b"]
    for name, logits in wanted.items():
        model.set_adapter(name)
        assert_logits(model(ids).logits, logits, logits)
    model.disable_adapters()
    assert_logits(model(ids).logits, base, base)
    with pytest.raises(RuntimeError, match=r"takes no adapter_names; load with peft\.PeftModel"):
        model(ids, adapter_names=["a"] * len(ids))
    model.enable_adapters()
    model.delete_adapter(["a", "b"])
    assert_logits(model(ids).logits, base, base)
    moelora_peft.detach(model)
    assert not hasattr(model, "_moelora")


def merged_states(model, ids):
    """Logits while adapters are merged, unmerged and deleted, and a text of a merged model."""
    model.set_adapter("a")
    model.merge_adapter()
    yield model(ids).logits
    yield model.base_model(ids).logits
    yield model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).float()
    model.set_adapter("c")  # unmerges
    yield model(ids).logits
    model.merge_adapter()
    with model.disable_adapter():  # unmerges, too
        yield model(ids).logits
    yield model(ids).logits
    model.merge_adapter()
    model.unmerge_adapter()
    yield model(ids).logits
    model.delete_adapter("a")
    model.delete_adapter("c")
    yield model.base_model(ids).logits


@pytest.mark.parametrize("config", ["mixtral", "gpt_oss"])
def test_merged_adapters(config, tmp_path):
    """What PEFT's model computes while adapters are merged, and after the last one is deleted."""
    model, ids = make_model(config), tokens(length=5)
    alone = peft_of(model, save_adapters(model, tmp_path, "ac"))
    attached = copy.deepcopy(alone)
    moelora_peft.attach(attached)
    states = zip(merged_states(attached, ids), merged_states(alone, ids), strict=True)
    for n, (got, wanted) in enumerate(states):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4, msg=f"state {n}")
    moelora_peft.detach(attached)
    assert not hasattr(attached.get_submodule("base_model.model"), "_moelora")


@torch.enable_grad()
@pytest.mark.parametrize("how", ["unload", "merge_and_unload"])
@pytest.mark.parametrize("config", ["mixtral", "gpt_oss"])
def test_unloaded_models(config, how, tmp_path):
    """They are models of transformers: nothing of PEFT or of a pool is left, and they train."""
    plain, ids = make_model(config), tokens()
    folders = save_adapters(plain, tmp_path, "ac")
    alone = peft_of(copy.deepcopy(plain), folders)
    attached = copy.deepcopy(alone)
    moelora_peft.attach(attached)
    attached(ids)
    wanted, base = (getattr(each, how)() for each in (alone, attached))
    with torch.no_grad():
        torch.testing.assert_close(base(ids).logits, wanted(ids).logits, rtol=2e-4, atol=2e-4)
    assert base.get_experts_implementation() == plain.get_experts_implementation()
    assert not any(hasattr(module, "_moelora") for module in base.modules())
    freed = weakref.ref(attached)
    del attached
    gc.collect()
    assert freed() is None
    with pytest.raises(ValueError, match="without adapters of PEFT"):
        moelora_peft.detach(base)
    base.requires_grad_(True)(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for n, p in base.named_parameters() if n.endswith("experts.down_proj"))
    base.requires_grad_(False)
    moelora_hf.load_adapters(base, {"c": folders["c"]})
    with torch.no_grad():
        got, expected = base(ids, adapter_names=["c"] * 5), with_peft(wanted, folders["c"])(ids)
        torch.testing.assert_close(got.logits, expected.logits, rtol=2e-4, atol=2e-4)


def test_adapters_that_come_later(tmp_path):
    """They are copied at first use, over the least recently used; some know nothing of experts."""
    model = make_model("mixtral")
    ids = tokens()
    folders = save_adapters(model, tmp_path, OPTIONS)
    rows = ["a", "attention", None, "a", "attention"]
    wanted = {rows: oracle(model, folders, rows, ids) for rows in (tuple(rows), tuple(ROWS))}
    model = peft_of(model, {"a": folders["a"]})
    pool = moelora_peft.attach(model, max_loras=2, max_rank=8)
    for name in ("b", "c", "attention"):
        model.load_adapter(folders[name], adapter_name=name)

    def run(rows):
        names = [row or "__base__" for row in rows]
        return model(ids, adapter_names=names).logits

    torch.testing.assert_close(run(rows), wanted[tuple(rows)], rtol=2e-4, atol=2e-4)
    assert pool.names() == ["a"]
    run(["b"] * 5)
    run(["a"] * 4 + ["c"])
    assert sorted(pool.names()) == ["a", "c"]
    full = r"no slot for adapter 'b': all 2 .* or in use; attach\(model, max_loras=\)"
    with pytest.raises(RuntimeError, match=full):
        run(ROWS)
    with pytest.raises(ValueError, match=r"'b' has rank 8.* for 5; attach\(model, max_rank=8\)"):
        moelora_peft.attach(model, max_rank=5)
    moelora_peft.attach(model)
    torch.testing.assert_close(run(ROWS), wanted[tuple(ROWS)], rtol=2e-4, atol=2e-4)


def test_copies_and_detached_models(tmp_path):
    model = make_model("mixtral")
    ids = tokens()
    model = peft_of(model, save_adapters(model, tmp_path))
    model.set_adapter("a")
    plain = model(ids).logits
    moelora_peft.attach(model)
    wanted = model(ids, adapter_names=NAMES).logits
    copied = copy.deepcopy(model)
    for factor in (p for n, p in model.named_parameters() if "lora_" in n):
        factor.zero_()
    pickled = pickle.loads(pickle.dumps(copied))
    torch.testing.assert_close(pickled(ids).logits, plain, rtol=2e-4, atol=2e-4)
    moelora_peft.attach(pickled)
    for other in (copied, pickled):
        torch.testing.assert_close(other(ids, adapter_names=NAMES).logits, wanted)
    moelora_peft.detach(copied)
    torch.testing.assert_close(copied(ids).logits, plain, rtol=2e-4, atol=2e-4)


def test_adapters_of_moelora_after_those_of_peft(tmp_path):
    """And the other way round: each is loaded once the other is unloaded, also into copies."""
    model = make_model("mixtral")
    ids = tokens()
    folders = save_adapters(model, tmp_path)
    attached = peft_of(model, {"a": folders["a"]})
    moelora_peft.attach(attached)
    wanted = attached(ids).logits
    message = r"peft.detach\(peft_model\), then peft_model.unload"
    for call in (moelora_hf.unload_adapters, lambda m: moelora_hf.load_adapters(m, folders)):
        with pytest.raises(RuntimeError, match=message):
            call(attached.get_base_model())
    base = attached.unload()
    after = copy.deepcopy(base)
    moelora_hf.load_adapters(base, folders)
    got = base(ids, adapter_names=["a"] * len(ids)).logits
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    for served in (copy.deepcopy(base), base):
        if served is base:
            moelora_hf.unload_adapters(base)
        expected = peft_of(copy.deepcopy(after), {"c": folders["c"]})(ids).logits
        served = peft_of(served, {"c": folders["c"]})
        moelora_peft.attach(served)
        torch.testing.assert_close(served(ids).logits, expected, rtol=2e-4, atol=2e-4)


def test_misuse(tmp_path):
    model = make_model("mixtral")
    ids = tokens()
    folders = save_adapters(model, tmp_path, OPTIONS)
    plain = peft_of(copy.deepcopy(model), {"attention": folders["attention"]})
    with pytest.raises(ValueError, match="no adapter of this model targets its experts"):
        moelora_peft.attach(plain)
    model = peft_of(model, {"a": folders["a"], "b": folders["b"]})
    for wrong, error, why in (
        ({"max_loras": 0}, ValueError, "max_loras is 0, wanted an integer >= 1"),
        ({"folders": "a"}, ValueError, "folders is a str, wanted a mapping"),
        ({"folders": {"c": folders["a"]}}, ValueError, "names 'c', which is none of the model's"),
        ({"folders": {"a": None}}, ValueError, "folders has None for 'a', wanted a folder"),
        ({"folders": {"a": tmp_path}}, FileNotFoundError, "of adapter 'a' has no adapter_config"),
    ):
        with pytest.raises(error, match=why):
            moelora_peft.attach(model, **wrong)
    moelora_peft.attach(model)
    batch = {"input_ids": ids, "adapter_names": NAMES, "max_new_tokens": 2, "do_sample": True}
    beams = transformers.GenerationConfig(num_beams=3)
    for copies, why in (
        ({"num_return_sequences": 2}, "repeat each prompt and its name 2 times, without num_"),
        ({"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences=3 with adapter_names"),
        ({"generation_config": beams}, "num_beams=3 with .*; pass num_beams=3 to generate"),
    ):
        with pytest.raises(ValueError, match=why):
            model.generate(**batch, **copies)
    with pytest.raises(NotImplementedError, match="generate_batch with adapter_names: PEFT"):
        model.generate_batch(ids.tolist(), adapter_names=NAMES)
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(ids, adapter_names=["d"] * 5)
    experts = model.base_model.model.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError, match="35 tokens outside a call of the model reached model"):
        experts(torch.zeros(35, 32), None, None, adapter_names=["a", "b"])
    with pytest.raises(RuntimeError, match="pass adapter_names to the PEFT model"):
        model.get_base_model()(ids, adapter_names=NAMES)
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="experts_implementation='eager', which knows no"):
        model(ids)
    model.get_base_model().set_experts_implementation("moelora")
    model.base_model.set_adapter(["a", "b"])
    with pytest.raises(NotImplementedError, match=r"\['a', 'b'\] are active at once"):
        model(ids)
    model.set_adapter("a")
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapter_names with an adapter merged into model.layers"):
        experts(torch.zeros(35, 32), None, None, adapter_names=["a", "b"])
    experts.base_layer.unmerge()
    with pytest.raises(NotImplementedError, match="has adapter 'a' beside others that are merged"):
        experts(torch.zeros(35, 32), None, None)


def test_one_name_per_row(tmp_path):
    model = make_model("mixtral")
    model = peft_of(model, {"c": save_adapters(model, tmp_path, "c")["c"]})
    moelora_peft.attach(model)
    for rows in (1, 2, 4, 10):
        with pytest.raises(ValueError, match=f"has {rows} names, the model was called with 5 rows"):
            model(tokens(), adapter_names=["c"] * rows)
