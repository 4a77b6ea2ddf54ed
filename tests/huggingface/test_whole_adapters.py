"""Adapters of attention, shared experts, dense layers, routers, embeddings and experts together:
mixed batches through `load_adapters` against weights that adapters are merged into."""

import copy
import pickle

import pytest
import torch
import whole_adapters as example
from hf_models import PLACES, one_layer, tokens, transformers
from small_models import MODELS
from threads import elsewhere
from whole_models import ROWS, make_whole_model, merged, served, wanted_logits, write_adapter

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import tokens as tokens_module

pytestmark = pytest.mark.usefixtures("no_grad")

BASE = ["__base__"] * len(ROWS)


def assert_close(got, wanted, naive):
    """In float32 by each row's norm, as adapters of everything make some logits large.

    Else most tokens must be as close to `wanted` as those of `naive` are: adapters of routers make
    some flip between experts, and attention spreads that over a row.
    """
    if got.dtype == torch.float32:
        off = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        assert (off <= 1e-4).all(), off
        return
    ours, theirs = ((x.float() - wanted).abs().mean(-1) for x in (got, naive))  # of each token
    close = ours <= 4 * theirs.median(-1, keepdim=True).values
    assert close.float().mean() >= 0.6, (ours, theirs)


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
@pytest.mark.parametrize(("config", "length"), [*((c, 9) for c in MODELS), ("qwen3_moe", 150)])
def test_mixed_batch(config, length, place, tmp_path, monkeypatch):
    """Many tokens are sorted once, for all layers of the pass; few are grouped where loaded."""
    model, ids, folders = served(tmp_path, config, place, length=length)
    exact = copy.deepcopy(model).float()
    wanted = wanted_logits(exact, folders, ROWS, ids)
    naive = wanted_logits(model, folders, ROWS, ids)
    base = exact(ids).logits
    pool = moelora_hf.load_adapters(model, folders)
    assert pool.names() == list(folders)
    sorts, sort = [], tokens_module._sort
    monkeypatch.setattr(tokens_module, "_sort", lambda *a: sorts.append(1) or sort(*a))
    got = model(ids, adapter_names=ROWS).logits
    assert len(sorts) == (length > 100)
    for i, row in enumerate(ROWS):
        difference = (wanted[i] - base[i]).abs().max()
        assert (difference > 0.1) == (row is not None), "an adapter must be seen in the logits"
    assert_close(got, wanted, naive)
    assert torch.equal(got[1], model(ids).logits[1]), "base rows keep their bits"
    assert torch.equal(model(ids, adapter_names=BASE).logits, model(ids).logits)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("config", ["deepseek_v3", "mixtral", "gemma4_text"])
def test_sixteen_bits(config, place, tmp_path):
    """Layers of each kind; embeddings and routers that compute in float32 get theirs from torch."""
    model = make_whole_model(config, place[1], place[0])
    ids = tokens(length=9, device=model.device)
    kinds = {
        "embedding": lambda name: "embed_tokens" in name,
        "attention": lambda name: "self_attn" in name,
        "head": lambda name: name == "lm_head",
        "router": lambda name: name.endswith((".gate", ".router.proj")),
        "mlp": lambda name: name.endswith(("down_proj", "experts")),
    }
    folders = {kind: write_adapter(model, tmp_path / kind, 1, kinds[kind]) for kind in kinds}
    exact = copy.deepcopy(model).float()
    wanted, naive = (wanted_logits(m, folders, list(kinds), ids) for m in (exact, model))
    moelora_hf.load_adapters(model, folders)
    got = model(ids, adapter_names=list(kinds)).logits
    ours, theirs = ((x.float() - wanted).abs().mean(-1) for x in (got, naive))  # of each token
    assert (ours.median(-1).values <= 2 * theirs.median(-1).values).all(), (ours, theirs)
    base = model(ids, adapter_names=["head", *[None] * 4]).logits
    assert torch.equal(base[1:], model(ids).logits[1:])


# ---- batches and calls of other shapes ----


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}])
def test_generate(options, tmp_path):
    """What each adapter generates alone; `lm_head` takes some tokens of every row."""
    model, _, folders = served(tmp_path)
    rows = ["mlp"] if "prompt_lookup_num_tokens" in options else ROWS
    ids = tokens(rows=len(rows), length=6)
    options = {"max_new_tokens": 6, "do_sample": False} | options
    wanted = model.generate(ids, **options)
    for name, folder in folders.items():
        chosen = [i for i, row in enumerate(rows) if row == name]
        if chosen:
            wanted[chosen] = merged(model, folder).generate(ids[chosen], **options)
    moelora_hf.load_adapters(model, folders)
    assert torch.equal(model.generate(ids, adapter_names=rows, **options), wanted)
    settings = transformers.GenerationConfig(**options)
    assert torch.equal(model.generate(ids, settings, adapter_names=rows), wanted)
    kept = model(ids, adapter_names=rows, logits_to_keep=2).logits
    torch.testing.assert_close(kept, model(ids, adapter_names=rows).logits[:, -2:])


def test_assisted_generation(tmp_path):
    """A draft model without adapters proposes, the model with its adapter decides."""
    model, ids, folders = served(tmp_path, rows=1, length=6)
    draft, options = copy.deepcopy(model), {"max_new_tokens": 8, "do_sample": False}
    wanted = merged(model, folders["all"]).generate(ids, **options)
    moelora_hf.load_adapters(model, folders)
    got = model.generate(ids, adapter_names=["all"], assistant_model=draft, **options)
    assert torch.equal(got, wanted)
    assert not torch.equal(wanted, draft.generate(ids, **options))


def test_tokens_of_unknown_rows_are_refused(tmp_path):
    """Where a layer takes other tokens than the batch has, rows would get each other's adapter."""
    model, _, folders = served(tmp_path, "mixtral")
    moelora_hf.load_adapters(model, folders)
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, args: (args[0][:, :4].flatten(0, 1),))
    with pytest.raises(RuntimeError, match=r"self_attn.o_proj was called with tokens \(20,\) in a"):
        model(tokens(), adapter_names=ROWS)
    with moelora_hf.use_adapters(model, ROWS):
        with pytest.raises(RuntimeError, match="lm_head was called outside a call of the model"):
            model.lm_head(torch.zeros(5, 1, 32))


# ---- compilers, copies, other libraries ----


def test_compile(tmp_path):
    """Without a graph break, routers included, and adapters change without compiling again."""
    torch.compiler.reset()
    model, ids, folders = served(tmp_path, one_layer("mixtral"))
    base = model(ids).logits
    moelora_hf.load_adapters(model, folders)
    graphs, compiled_once = [], 0

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (ROWS, ["mlp"] * 5, [None] * 5):
        with moelora_hf.use_adapters(model, rows):
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
            # What was compiled here asks what the thread carries that runs it.
            torch.testing.assert_close(elsewhere(lambda: compiled(ids).logits), base)
        if not compiled_once:
            compiled_once = len(graphs)
        assert len(graphs) == compiled_once
    torch.testing.assert_close(compiled(ids).logits, base)


def test_copies_have_no_adapters_and_unloaded_models_no_traces(tmp_path):
    model, ids, folders = served(tmp_path)
    base = model(ids).logits
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    moelora_hf.load_adapters(model, folders)
    wanted = model(ids, adapter_names=ROWS).logits
    plain = model(ids).logits
    torch.testing.assert_close(plain, base)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(ids).logits, plain)
        with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
            copied(ids, adapter_names=ROWS)
        moelora_hf.load_adapters(copied, folders)
        assert torch.equal(copied(ids, adapter_names=ROWS).logits, wanted)
    assert torch.equal(model(ids, adapter_names=ROWS).logits, wanted)
    moelora_hf.unload_adapters(model)
    assert torch.equal(model(ids).logits, plain)
    for name, module in model.named_modules():
        assert len(module._forward_hooks) == hooks[name]
        own = isinstance(
            module, transformers.PreTrainedModel
        )  # these refuse adapter_names for good
        assert own or "forward" not in module.__dict__, name


def test_modules_that_others_have_wrapped(tmp_path):
    """torch.compile and activation checkpointing put modules around those of a model."""
    wrap = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model, ids, folders = served(tmp_path)
    moelora_hf.load_adapters(model, folders)
    wanted = model(ids, adapter_names=ROWS).logits
    moelora_hf.unload_adapters(model)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    layer = model.model.layers[1]
    layer.mlp = wrap.checkpoint_wrapper(layer.mlp)
    with pytest.raises(RuntimeError, match="load_adapters"):
        moelora_hf.pool(model)
    pool = moelora_hf.load_adapters(model, folders)
    assert moelora_hf.pool(model) is pool
    assert "model.layers.1.mlp.experts" in pool.layers
    torch.testing.assert_close(model(ids, adapter_names=ROWS).logits, wanted)


@torch.enable_grad()
def test_the_example(monkeypatch, tmp_path):
    """One of its four adapters, in one batch with the base model."""
    torch.manual_seed(0)
    monkeypatch.setattr(example, "STEPS", 24)
    line = example.LINES["window"]
    assert example.train(line, tmp_path) < 0.5
    text, base = example.serve({"window": tmp_path})
    assert text.startswith(example.PROMPT + line[:4]), text
    assert base.startswith(example.PROMPT + "__init__")
