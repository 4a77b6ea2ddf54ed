"""Folders of tenants: what is saved resumes with the bits of one run; damaged ones are refused."""

import json

import pytest
import torch
from tenant_house import FLOAT32, PLACES, E, House, K, R, draw, same

import moelora
from moelora.operators.sparse import sparse_tensor
from moelora.training import Tenants
from moelora.training.tenants import tenant as module
from moelora.training.tenants.files import STATE_FILES, read_state, write_state


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", [2, 3], ids=["between-updates", "within-accumulation"])
def test_resumed_from_a_folder(place, when, tmp_path):
    """In another process, pool, slot and company: the bits of one run."""
    house = House(place, "law", "code")
    house.steps(["law", "code"], range(when))
    house.tenants["code"].optimizer.param_groups[0]["lr"] = 3e-3
    for name in ("law", "code"):
        house.tenants.save(name, tmp_path / name)
    house.steps(["law", "code"], range(when, 6))
    again = House(place, "med")
    tenant = again.add("code", tmp_path / "code", resume=True)
    again.steps(["med", "code"], range(when, 6))
    assert tenant.optimizer.param_groups[0]["lr"] == 3e-3
    assert tenant.updates == house.tenants["code"].updates == 3
    assert same(again.factors("code"), house.factors("code"))


def mixed_pool(order=1):
    """Twelve layers of experts, and linear layers and an embedding of several shapes."""
    layers = [moelora.MoELayer(f"layers.{n}.experts", 2, 8, 8) for n in range(12)]
    linears = [
        *(moelora.LinearLayer(f"layers.{n}.q_proj", 8, 16 if n % 2 else 8) for n in range(12)),
        moelora.LinearLayer("embed_tokens", 24, 8, embedding=True),
    ]
    return moelora.AdapterPool(
        layers[::order], 2, R, dtype=torch.float32, w13_slices=1, linears=linears[::order]
    )


def descend(tenants, name, number):
    """A step of gradients drawn by name and number, of all factors and without a model."""
    target = tenants[name]
    loss = torch.zeros(())
    for key, factor in target._keyed().items():
        own = factor.stack[factor.slot].narrow(factor.dim, 0, factor.rank)
        loss = loss + (own * draw(number + sum("".join(key).encode()), *own.shape)).sum()
    return tenants.step({name: loss})[name]


@pytest.mark.parametrize("order", [1, -1], ids=["same-order", "other-order"])
@pytest.mark.parametrize("when", [2, 3], ids=["between-updates", "within-accumulation"])
def test_moments_are_resumed_by_key(when, order, tmp_path):
    """A folder's factors come in another order than a new tenant's; so may the pool's layers."""
    tenants = Tenants(mixed_pool())
    tenants.add("law", rank=4, lr=1e-2, accumulation=2)
    for number in range(when):
        descend(tenants, "law", number)
    tenants.save("law", tmp_path)
    again = Tenants(mixed_pool(order))
    again.add("law", tmp_path, resume=True)
    for number in range(when, 6):
        assert [descend(t, "law", number).updated for t in (tenants, again)] == [number % 2] * 2
    found, wanted = (t["law"]._keyed() for t in (again, tenants))
    assert found.keys() == wanted.keys() and len(wanted) == 2 * (2 * 12 + 13)
    for key, factor in wanted.items():
        assert torch.equal(found[key].parameter, factor.parameter), key


def left_in(folder, **options):
    """A house whose tenant "law" was saved after a step, and is gone."""
    house = House(FLOAT32, "law", **options)
    house.steps(["law"], range(1))
    house.tenants.save("law", folder)
    house.tenants.remove("law")
    return house


def test_states_of_others_are_refused(tmp_path):
    house = left_in(tmp_path)
    sgd = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    for options, name in (({"sparse": True}, "SparseAdam"), ({"optimizer": sgd}, "SGD")):
        with pytest.raises(ValueError, match=f"AdamW, not of {name}: pass sparse= or optimizer="):
            house.add("law", tmp_path, resume=True, **options)
    saved = read_state(tmp_path)
    for changes, why in (
        ({"format": 2}, "training.json is of format 2, wanted 1"),
        ({"factors": {}}, "is not of this adapter: .* is None there"),
    ):
        write_state(tmp_path, saved | changes)
        with pytest.raises(ValueError, match=why):
            house.add("law", tmp_path, resume=True)
    assert not house.pool.names()


def tagged(text):
    """Content of training.json whose key `updates` has this value."""
    return ('{"format": 1, "updates": ' + text + "}").encode()


TAGGED = ['{"$tensor": "none"}', '{"$tensor": [1]}', '{"$other": 3}', '{"$sparse": []}']
TAGGED += ['[{"$tensor": "0"}, {"$tensor": "0"}]', '{"$dict": 3}']
TAGGED += ['{"$dict": [[{"$tuple": [[1]]}, 2]]}']
TEXTS = [b"", b"garbage" * 99, b"[1]", b"[" * 100_000, b"{}", *map(tagged, TAGGED)]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("training.json", lambda whole, text=text: text) for text in TEXTS),
        ("training.json", lambda whole: whole[: len(whole) // 2]),
        ("training.json", lambda whole: whole.replace(b'"$tensor": "0"', b'"$tuple": []')),
        ("training.safetensors", lambda whole: b""),
        ("training.safetensors", lambda whole: b"\xff" * 64),
        ("training.safetensors", lambda whole: whole[: len(whole) // 2]),
        ("training.safetensors", lambda whole: whole.replace(b'"0":', b'"x":')),
    ],
)
def test_damaged_states_are_refused(file, content, tmp_path):
    """Before another adapter is evicted for the new one."""
    house = left_in(tmp_path, max_loras=1)
    house.pool.add("served", tmp_path)
    path = tmp_path / file
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ValueError, match=r"training\.\w+ (is|has) (damaged|not|a |of |tensors)"):
        house.add("law", tmp_path, resume=True)
    assert house.pool.names() == ["served"]


@pytest.mark.parametrize(
    "change",
    [
        {"updates": "two"},
        {"pending": -1},
        {"accumulation": 0},
        {"accumulation": 10**4000},
        {"max_norm": "large"},
        {"groups": [{}]},
        {"factors": 3},
        {"gradient": torch.zeros(2)},
        {"state": None},
        {"shape": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_states_with_other_content_are_refused(change, tmp_path):
    """A key is of another type than `save` writes, of all or of one factor."""
    house = left_in(tmp_path)
    saved = read_state(tmp_path)
    (saved if change.keys() <= saved.keys() else next(iter(saved["factors"].values()))).update(
        change
    )
    write_state(tmp_path, saved)
    with pytest.raises(ValueError, match=rf"damaged: .*{next(iter(change))}"):
        house.add("law", tmp_path, resume=True)
    assert not house.pool.names()


FIRST = r"layers\.0\.experts\.gate_up\.A"
SHAPE = (E, 4, K)  # of the factor that is called so
MISSING = object()  # of a key


def sparse(index, **changes):
    """A gradient of one expert, or of those that `index` names."""
    index = torch.tensor(index)
    values = torch.ones(index.size(-1), *SHAPE[1:])
    return torch.sparse_coo_tensor(index, values, SHAPE, check_invariants=False, **changes)


@pytest.mark.parametrize(
    ("entry", "value", "why"),
    [
        ("gradient", sparse([[10**9]]), f"gradient of {FIRST} has index 1000000000 of an expert"),
        ("gradient", sparse([[-3]]), f"gradient of {FIRST} has index -3 of an expert, .* 0 to 3"),
        ("gradient", sparse([[1, 1]]), "indices out of order or twice"),
        ("gradient", sparse([[1]]).to(torch.complex64), "complex64, wanted float32"),
        ("gradient", sparse([[1]]).to(torch.bool), "is bool, wanted float32"),
        ("gradient", torch.ones(SHAPE).to_sparse(2), "is sparse in 2 dimensions"),
        ("gradient", torch.ones(SHAPE, dtype=torch.complex64), "complex64, wanted float32"),
        ("gradient", torch.ones(SHAPE, dtype=torch.bool), "is bool, wanted float32"),
        ("gradient", torch.ones(()).expand(SHAPE), r"has strides \(0, 0, 0\)"),
        ("gradient", torch.full(SHAPE, float("inf")), "not finite"),
        ("exp_avg", torch.ones(2), r"exp_avg of .* is \(2,\), wanted a tensor of shape"),
        ("exp_avg", torch.ones(SHAPE, dtype=torch.int64), "is int64, wanted float32 or"),
        ("exp_avg", torch.ones(()).expand(SHAPE), r"has strides \(0, 0, 0\)"),
        ("exp_avg_sq", torch.full(SHAPE, -1.0), "negative"),
        ("exp_avg_sq", torch.full(SHAPE, float("nan")), "has NaN"),
        ("step", torch.tensor(-1.0), "step of .* wanted a number of updates"),
        ("step", torch.ones(SHAPE), "step of .* wanted a number of updates"),
        ("step", float("nan"), "step of .* is nan"),
        ("extra", torch.ones(1).expand(10**9), r"extra of .* has strides \(0,\)"),
        ("extra", {"a": [1j]}, "a in extra of .* is 1j, wanted a finite number"),
        ("lr", float("nan"), "lr of group 0 is nan"),
        ("weight_decay", -1.0, "weight_decay of group 0 is -1.0"),
        ("betas", (0.9, 1.0), "betas of group 0 is"),
        ("eps", float("inf"), "eps of group 0 is inf"),
        ("lr", 1e39, "lr of group 0 is 1e\\+39, wanted a finite number >= 0"),
        ("lr", MISSING, "group 0 in training.json has no lr, as AdamW has"),
        ("betas", MISSING, "group 0 in training.json has no betas, as AdamW has"),
        ("eps", MISSING, "group 0 in training.json has no eps"),
        ("weight_decay", MISSING, "group 0 in training.json has no weight_decay"),
        ("exp_avg", MISSING, f"training.json has no exp_avg of {FIRST}"),
        ("amsgrad", True, f"training.json has no max_exp_avg_sq of {FIRST}"),
        ("amsgrad", "yes", "amsgrad of group 0 is 'yes', wanted True or False"),
        ("params", [], "has other groups of parameters than the optimizer"),
        ("params", [{}], "params of group 0 has {}, which is no factor"),
        ("params", ["law"], "params of group 0 has 'law', which is no factor"),
    ],
)
def test_states_that_would_stop_others_are_refused(entry, value, why, tmp_path):
    """By the tenant's name, before the pool is touched; others train on."""
    house = left_in(tmp_path)
    saved = read_state(tmp_path)
    factor = saved["factors"]["layers.0.experts", "gate_up", "A"]
    assert factor["shape"] == SHAPE
    places = (factor, saved["groups"][0], saved)
    of = next((place for place in places if entry in place), factor["state"])
    if value is MISSING:
        del of[entry]
    else:
        of[entry] = value
    house.add("med")
    before = [t.clone() for t in house.pool._tensors()]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="'law': .*" + why):
        patch.setattr(module, "read_state", lambda folder: saved)
        house.add("law", tmp_path, resume=True)
    assert house.tenants.names() == ["med"] and same(house.pool._tensors(), before)


@pytest.mark.parametrize("setting", ["lr", "weight_decay", "eps"])
def test_a_setting_of_any_size_concerns_its_tenant_alone(setting, tmp_path):
    """Resumed as an optimizer of torch takes it, up to what float32 holds."""
    house = House(FLOAT32, "law")
    house.steps(["law"], range(1))
    house.tenants["law"].optimizer.param_groups[0][setting] = 3e38
    house.tenants.save("law", tmp_path)
    house = House(FLOAT32, "med")
    law = house.add("law", tmp_path, resume=True)
    assert law.optimizer.param_groups[0][setting] == 3e38
    steps = house.steps(["med", "law"], range(2))
    house.assert_as_alone(["med"], range(2))
    assert [step["med"].updated for step in steps] == [True, True]
    # A large eps makes updates small.
    assert (law.stopped is None) == (setting == "eps")


def test_saved_folders_are_pefts(tmp_path):
    """Of every pool that takes them, served as trained; with the ranks and scalings of each."""
    house = House(FLOAT32, "law", "code")
    house.steps(["law", "code"], range(4))
    for name in ("law", "code"):
        house.tenants.save(name, tmp_path / name, optimizer=False, base_model="org/base")
        files = {p.name for p in (tmp_path / name).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "code/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 4.0)
    assert config["base_model_name_or_path"] == "org/base"
    served = House(FLOAT32)
    for name in ("law", "code"):
        served.pool.add(name, tmp_path / name)
    found, wanted = (h.losses(["law", "code"], 9) for h in (served, house))
    assert found == wanted
    for folder, why in (("law", "no training.json: it was saved"), ("none", "not a folder")):
        with pytest.raises(FileNotFoundError, match=f"tenant 'other': .*{folder} .*{why}"):
            served.add("other", tmp_path / folder, resume=True)
    assert "other" not in served.pool


def test_a_replaced_adapter_is_not_saved_nor_trained(tmp_path):
    """What is in its slot by now belongs to another adapter, which trains."""
    house = House(FLOAT32, "law")
    house.tenants["law"].accumulation = 2
    house.steps(["law"], range(1))
    house.pool.remove("law")
    house.add("code")
    house.steps(["code"], range(1))
    grads = [grad.clone() for grad in house.tenants["code"].gradients()]
    house.tenants.step({"law": torch.ones((), requires_grad=True)})
    for call in (lambda: house.tenants.save("law", tmp_path / "law"), house.tenants["law"].state):
        with pytest.raises(RuntimeError, match="adapter 'law' has left the pool: nothing to save"):
            call()
    assert not (tmp_path / "law").exists()
    house.tenants.remove("law")
    assert same(house.tenants["code"].gradients(), grads)


def test_a_save_that_fails_leaves_the_folder(tmp_path, monkeypatch):
    house = House(FLOAT32, "law")
    house.tenants.save("law", tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    house.steps(["law"], range(1))

    def full(state, path, metadata=None):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr("safetensors.torch.save_file", full)
        house.tenants.save("law", tmp_path)
    house.tenants["law"].optimizer.param_groups[0]["hook"] = print
    with pytest.raises(ValueError, match=r"training.json cannot hold \['groups'\]\[0\]\['hook'\]"):
        house.tenants.save("law", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    house.tenants.save("law", tmp_path, optimizer=False)
    assert {path.name for path in tmp_path.iterdir()} == files.keys() - set(STATE_FILES)
    assert not list(tmp_path.parent.glob(".saving-*"))


def test_states_keep_their_types(tmp_path):
    """What optimizers of others may have; tensors that share memory come apart."""
    shared = torch.arange(4.0)
    state = {
        "numbers": [1, 2.5, float("inf"), True, None, "text", (0.9, (0.99,))],
        "lists": {"old_dirs": [shared, shared], "al": [None]},
        "keys": {
            3: shared[1:],
            ("layer", "up", "A"): {"$tensor": torch.ones((), dtype=torch.bool)},
        },
        "sparse": sparse_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (4, 2)),
    }
    write_state(tmp_path, state)
    found = read_state(tmp_path)
    assert found["numbers"] == state["numbers"] and found["keys"].keys() == state["keys"].keys()
    assert all(torch.equal(t, shared) for t in found["lists"]["old_dirs"])
    assert found["lists"]["al"] == [None]
    assert torch.equal(found["keys"][3], shared[1:])
    assert found["keys"]["layer", "up", "A"]["$tensor"].dtype == torch.bool
    assert found["sparse"].is_coalesced()
    assert torch.equal(found["sparse"].to_dense(), state["sparse"].to_dense())
