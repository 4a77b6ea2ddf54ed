"""Tenants of transformers models: experts and all other layers, in every dialect, and saved."""

import copy

import pytest
import torch
from dialects import DIALECTS, draw, merge
from hf_models import make_model, peft, tokens
from quantized_folders import make_folder
from torch.nn import functional as F

import moelora.integrations.transformers as moelora_hf
from moelora.training import Tenants

ROWS = ["a", "a", "b", None, "b"]
POOL = {"max_loras": 3, "max_rank": 8, "w13_slices": 1}


def prepared(model, targets=("experts",), **options):
    model = copy.deepcopy(model).requires_grad_(False)
    pool = moelora_hf.load_adapters(model, {}, **POOL | options, targets=targets)
    return model, Tenants(pool)


def add(tenants, name, **options):
    generator = torch.Generator().manual_seed(ord(name))
    return tenants.add(name, **{"lr": 1e-2, "generator": generator} | options)


def losses(model, ids, rows=ROWS):
    logits = model(ids, adapter_names=rows).logits.float()
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    names = dict.fromkeys(row for row in rows if row is not None)
    return {n: each[[i for i, row in enumerate(rows) if row == n]].mean() for n in names}


def train(model, tenants, ids, count=3, rows=ROWS):
    return [tenants.step(losses(model, ids, rows)) for _ in range(count)]


@pytest.mark.parametrize("config", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("targets", [["experts"], ["experts", "q_proj", "embed_tokens"]], ids=len)
def test_each_learns_as_with_peft_alone(tmp_path, config, targets):
    """From the folder that PEFT continues from, to the losses and logits that it comes to."""
    model, ids = make_model(config), tokens()
    ours, tenants = prepared(model, targets)
    for name, rank in (("a", 4), ("b", 8)):
        add(tenants, name, rank=rank)
        tenants.save(name, tmp_path / name, optimizer=False)
    found = train(ours, tenants, ids)
    for name in ("a", "b"):
        rows = [i for i, row in enumerate(ROWS) if row == name]
        theirs = copy.deepcopy(model)
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / name, is_trainable=True)
        parameters = [p for p in theirs.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        for step in found:
            loss = theirs(ids[rows], labels=ids[rows]).loss
            assert step[name].loss == pytest.approx(loss.item(), abs=2e-4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert found[-1][name].loss < found[0][name].loss - 0.1
        with torch.no_grad():
            got = ours(ids, adapter_names=[name] * len(ids)).logits
            torch.testing.assert_close(got, theirs(ids).logits, rtol=1e-2, atol=1e-2)


def test_others_in_the_batch_change_no_bits():
    """In batches of one shape: what others are, learn, or break makes no difference."""
    model, ids, factors = make_model("mixtral"), tokens(), []
    for company in ("base", "learns", "breaks"):
        ours, tenants = prepared(model)
        add(tenants, "a")
        add(tenants, "b", lr=3.0)
        for _ in range(3):
            rows = ["a", "a", *("b" if company != "base" else None,) * 3]
            found = losses(ours, ids, rows)
            if company == "breaks":
                found["b"] = found["b"] * float("inf")
            tenants.step(found)
        factors.append([p.detach().clone() for p in tenants["a"].parameters()])
        assert (tenants["b"].stopped is None) == (company != "breaks")
    for other in factors[1:]:
        assert all(map(torch.equal, factors[0], other))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_adapters_of_any_dialect_train_on(tmp_path, dialect):
    """They start as what they are, learn, and are saved in PEFT's dialect."""
    dialect, model, ids = DIALECTS[dialect], make_model("qwen3_moe"), tokens()
    drawn = draw(model, dialect.kind, seed=1, rank=3, embeddings=dialect.embeddings)
    folder = dialect.write(tmp_path / "theirs", drawn)
    ours, tenants = prepared(model, "all")
    tenants.add("a", folder, layout=dialect.layout, lr=1e-3)
    rows = ["a"] * len(ids)
    with torch.no_grad():
        start = ours(ids, adapter_names=rows).logits
        torch.testing.assert_close(start, merge(model, drawn)(ids).logits, rtol=5e-4, atol=5e-4)
    steps = train(ours, tenants, ids, 2, rows)
    assert all(step["a"].updated for step in steps) and steps[1]["a"].loss < steps[0]["a"].loss
    tenants.save("a", tmp_path / "ours")
    with torch.no_grad():
        trained = ours(ids, adapter_names=rows).logits
        assert (trained - start).abs().max() > 1e-3
    served = copy.deepcopy(model)
    moelora_hf.load_adapters(served, {"a": tmp_path / "ours"})
    with torch.no_grad():
        found = served(ids, adapter_names=rows).logits
        torch.testing.assert_close(found, trained, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("targets", [["experts"], ["experts", "q_proj"]], ids=len)
def test_activation_checkpointing(targets, sparse):
    """The repeated forward of a layer has the adapters of its rows, and the same bits."""
    model, ids, found = make_model("qwen3_moe"), tokens(), []
    for checkpointed in (False, True):
        ours, tenants = prepared(model, targets)
        add(tenants, "a", sparse=sparse)
        add(tenants, "b", sparse=sparse)
        ours.train()
        if checkpointed:
            moelora_hf.enable_checkpointing(ours)
        sum(losses(ours, ids).values()).backward()
        for name in tenants.pool.layers:
            assert tenants.pool.layer(name)["w2_lora_a"].grad.is_sparse == sparse
        for stack in tenants._stacks:
            stack.grad = None
        train(ours, tenants, ids, 2)
        found.append([p.detach() for n in "ab" for p in tenants[n].parameters()])
    assert all(map(torch.equal, *found))
    with pytest.raises(RuntimeError, match="has no adapters"):
        moelora_hf.enable_checkpointing(make_model("qwen3_moe"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_knows_no_adapters(reentrant):
    """It repeats layers without the adapters of their rows: refused where it would happen."""
    ids, (ours, tenants) = tokens(), prepared(make_model("qwen3_moe"))
    add(tenants, "a")
    rows = ["a"] * len(ids)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses(ours.eval(), ids, rows)
    ours.train()(ids)
    with torch.no_grad():
        ours(ids, adapter_names=rows)
    message = r"call moelora.integrations.transformers.enable_checkpointing\(model\)"
    with pytest.raises(RuntimeError, match=message):
        ours(ids, adapter_names=rows)
    with moelora_hf.use_adapters(ours, rows), pytest.raises(RuntimeError, match=message):
        ours(ids)
    moelora_hf.enable_checkpointing(ours)
    assert all(step["a"].updated for step in train(ours, tenants, ids, 2, rows))
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with pytest.raises(RuntimeError, match=message):
        ours(ids, adapter_names=rows)
    ours.gradient_checkpointing_disable()
    ours(ids, adapter_names=rows)


def test_many_tokens():
    """Batches that serving sorts by adapter, which training does not."""
    model, ids = make_model("mixtral"), tokens(5, 64).repeat(1, 2)
    short, long = (prepared(model, ["experts", "o_proj"]) for _ in range(2))
    norms = []
    for (ours, tenants), parts in ((short, ids.split(1)), (long, [ids])):
        add(tenants, "a", accumulation=len(parts), rank=4)
        for part in parts:
            step = tenants.step(losses(ours, part, ["a"] * len(part)))
        norms.append(step["a"].norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize(("kind", "group"), [("mxfp4", 32), ("bitsandbytes", 64)])
def test_of_quantized_experts(tmp_path, kind, group):
    """Served from the same tiles; attention has adapters, too."""
    make_folder(tmp_path / "model", kind, group)
    model = moelora_hf.load_quantized(tmp_path / "model").requires_grad_(False)
    pool = moelora_hf.load_adapters(model, {}, **POOL, targets=["experts", "q_proj", "v_proj"])
    tenants, ids = Tenants(pool), tokens(5)
    for name in ("a", "b"):
        add(tenants, name)
    steps = train(model, tenants, ids, 4)
    for name in ("a", "b"):
        assert steps[-1][name].loss < steps[0][name].loss - 0.05
        tenants.save(name, tmp_path / name)
    served = moelora_hf.load_quantized(tmp_path / "model")
    moelora_hf.load_adapters(served, {name: tmp_path / name for name in ("a", "b")})
    with torch.no_grad():
        found, wanted = (m(ids, adapter_names=ROWS).logits for m in (served, model))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
