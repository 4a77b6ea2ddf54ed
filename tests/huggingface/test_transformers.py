"""`experts_implementation="moelora"` and mixed batches of adapters against transformers + PEFT."""

import copy
import json

import pytest
import torch
from hf_models import (
    MODELS,
    PLACES,
    ROWS,
    assert_logits,
    gpt_oss,
    make_model,
    mixtral,
    oracle,
    qwen3,
    save_adapter,
    save_adapters,
    tokens,
    transformers,
    with_peft,
)
from safetensors.torch import save_file
from small_models import SIZES

import moelora.integrations.transformers as moelora_hf

# PEFT looks for the patterns among modules, and so misses those of parameters, which do apply.
pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
]


@pytest.fixture(params=PLACES)
def place(request):
    """(device, dtype)"""
    return request.param


@pytest.fixture(params=MODELS, ids=lambda c: c.__name__)
def model(request, place):
    device, dtype = place
    return make_model(request.param, dtype, device)


# ---- the base model ----


def test_base_model(model):
    ids = tokens(device=model.device)
    wanted = copy.deepcopy(model).float()(ids).logits
    naive = model(ids).logits
    model.set_experts_implementation("moelora")
    assert_logits(model(ids).logits, wanted, naive)
    assert wanted.abs().mean() > 0.1


@torch.enable_grad()
def test_gradients_of_weights_are_refused(model):
    model.set_experts_implementation("moelora")
    ids = tokens(device=model.device)
    with pytest.raises(RuntimeError, match="gate_up_proj requires a gradient, which"):
        model(ids)
    model.requires_grad_(False)
    model(ids)


# ---- adapters ----


def test_mixed_batch_is_what_peft_computes(model, tmp_path):
    ids = tokens(length=16, device=model.device)
    folders = save_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    wanted, base = oracle(exact, folders, ROWS, ids), exact(ids).logits
    naive = oracle(model, folders, ROWS, ids)
    pool = moelora_hf.load_adapters(model, folders)
    assert pool.names() == ["a", "b", "c"]
    assert pool.max_rank == 8
    with moelora_hf.use_adapters(model, ROWS):
        got = model(ids).logits
    for i, row in enumerate(ROWS):
        difference = (wanted[i] - base[i]).abs().max()
        assert (difference > 0.1) == (row is not None), "an adapter must be seen in the logits"
    assert_logits(got, wanted, naive)

    # Rows without an adapter, and everything after the context, are the base model's bits.
    plain = model(ids).logits
    assert torch.equal(got[1], plain[1])


def test_adapter_names(model, tmp_path):
    """PEFT's argument, for one pass and for generate."""
    ids = tokens(length=4, device=model.device)
    folders = save_adapters(model, tmp_path)
    moelora_hf.load_adapters(model, folders.values())
    names = [row or "__base__" for row in ROWS]
    base = model(ids).logits
    with moelora_hf.use_adapters(model, ROWS):
        wanted = model(ids).logits
        texts = model.generate(ids, max_new_tokens=5, do_sample=False)
        # An inner choice goes before an outer one, which then continues.
        assert torch.equal(model(ids, adapter_names=["__base__"] * 5).logits, base)
        assert torch.equal(model(ids).logits, wanted)
    assert not torch.equal(wanted, base)
    assert torch.equal(model(ids, adapter_names=names).logits, wanted)
    assert torch.equal(model(ids, adapter_names=ROWS).logits, wanted)
    options = {"adapter_names": names, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), texts)
    with moelora_hf.use_adapters(model, ROWS, expand=3):
        beams = model.generate(ids, num_beams=3, num_return_sequences=2, max_new_tokens=5)
    config = transformers.GenerationConfig(num_beams=3, max_new_tokens=5)
    got = model.generate(ids, adapter_names=names, generation_config=config, num_return_sequences=2)
    assert torch.equal(got, beams)
    # Nothing stays behind, neither after success nor after failure.
    assert torch.equal(model(ids).logits, base)
    with pytest.raises(ValueError, match="names 1 rows, the model was called with 5"):
        model(ids, adapter_names=["a"])
    with pytest.raises((AttributeError, TypeError)):
        model(ids, adapter_names=names, position_ids="of a wrong type")
    assert torch.equal(model(ids).logits, base)
    with pytest.raises(KeyError, match="no adapter 'd' is loaded"):
        model(ids, adapter_names=["d"] * 5)
    moelora_hf.unload_adapters(model)
    with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
        model.generate(ids, **options)


def test_generated_tokens_are_the_best_of_their_adapter(model, tmp_path):
    """Every token that a mixed batch generates is what PEFT, in float32, finds likeliest next."""
    ids = tokens(length=4, device=model.device)
    folders = save_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    moelora_hf.load_adapters(model, folders)
    texts = model.generate(ids, adapter_names=ROWS, max_new_tokens=8, do_sample=False)
    logits = oracle(exact, folders, ROWS, texts)[:, ids.shape[1] - 1 : -1]
    chosen = logits.gather(-1, texts[:, ids.shape[1] :, None]).squeeze(-1)
    short = (logits.amax(-1) - chosen) / logits.std(-1)
    if model.dtype == torch.float32:
        assert short.max() <= 1e-4, short
    else:  # a router may flip between two nearly equal experts
        assert (short <= 0.1).float().mean() >= 0.9, short
    assert len({tuple(row) for row in texts.tolist()}) == len(ROWS)


@pytest.mark.parametrize("config", [mixtral, qwen3, gpt_oss], ids=lambda c: c.__name__)
def test_per_expert_and_shared_checkpoints(config, tmp_path):
    """Forms that PEFT itself cannot make for these models, against weights with s B A added."""
    model = make_model(config)
    ids = tokens()
    generator = torch.Generator().manual_seed(5)

    def rand(*shape):
        return torch.randn(*shape, generator=generator) / 3

    merged = copy.deepcopy(model)
    per_expert, shared = {}, {}
    layers = moelora_hf.moe_layers(merged)
    for name, (_, layer) in layers.items():
        e, k, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        for projection, wide, tall in (("gate", k, i), ("up", k, i), ("down", i, k)):
            key = f"base_model.model.{name}.{projection}_proj"
            for n in range(e):
                inner = key.replace(".experts.", f".experts.{n}.")
                per_expert[f"{inner}.lora_A.weight"] = rand(4, wide)
                per_expert[f"{inner}.lora_B.weight"] = rand(tall, 4)
            outer = projection == "down"
            shared[f"{key}.lora_A.weight"] = rand(e if outer else 1, 4, wide)
            shared[f"{key}.lora_B.weight"] = rand(1 if outer else e, tall, 4)

    def product(form, name, projection, n):
        key = f"base_model.model.{name}.{projection}_proj"
        if form is per_expert:
            key = key.replace(".experts.", f".experts.{n}.")
            return form[f"{key}.lora_B.weight"] @ form[f"{key}.lora_A.weight"]
        a, b = form[f"{key}.lora_A.weight"], form[f"{key}.lora_B.weight"]
        return b[n if b.size(0) > 1 else 0] @ a[n if a.size(0) > 1 else 0]

    rows, forms = ["each", "shared", None, "each", "shared"], (per_expert, shared)
    folders = {}
    wanted = model(ids).logits
    for form, adapter in zip(forms, ("each", "shared"), strict=True):
        folders[adapter] = tmp_path / adapter
        folders[adapter].mkdir()
        (folders[adapter] / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6})
        )
        save_file(form, folders[adapter] / "adapter_model.safetensors")
        merged = copy.deepcopy(model)
        for name, (experts, layer) in moelora_hf.moe_layers(merged).items():
            for n in range(layer.num_experts):
                up, down = experts.gate_up_proj[n], experts.down_proj[n]
                if experts.is_transposed:
                    up, down = up.T, down.T
                halves = (up[::2], up[1::2]) if layer.interleaved else up.chunk(2)
                for half, projection in zip((*halves, down), ("gate", "up", "down"), strict=True):
                    half += 1.5 * product(form, name, projection, n)
        chosen = [i for i, row in enumerate(rows) if row == adapter]
        wanted[chosen] = merged(ids).logits[chosen]
    pool = moelora_hf.load_adapters(model, folders)
    assert not pool.shared_outer
    with moelora_hf.use_adapters(model, rows):
        torch.testing.assert_close(model(ids).logits, wanted, rtol=5e-4, atol=5e-4)
    moelora_hf.unload_adapters(model)
    pool = moelora_hf.load_adapters(model, {"shared": folders["shared"]})
    assert pool.shared_outer
    with moelora_hf.use_adapters(model, ["shared"] * 5):
        torch.testing.assert_close(model(ids).logits[1], wanted[1], rtol=5e-4, atol=5e-4)


def test_hot_add_while_serving(place, tmp_path):
    model = make_model(qwen3, place[1], place[0])
    ids = tokens(rows=2, length=16, device=model.device)
    folders = save_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    wanted = {name: oracle(exact, folders, [name] * 2, ids) for name in folders}
    naive = {name: oracle(model, folders, [name] * 2, ids) for name in folders}

    def check(row, name):
        assert_logits(got[row], wanted[name][row], naive[name][row])

    pool = moelora_hf.load_adapters(model, {"a": folders["a"]}, max_loras=2, max_rank=8)
    pool.add("b", folders["b"])
    with moelora_hf.use_adapters(model, ["a", "b"]):
        got = model(ids).logits
        check(0, "a")
        with pytest.raises(RuntimeError, match="all 2 are pinned or in use"):
            pool.add("c", folders["c"])
    pool.lookup("a")
    pool.add("c", folders["c"])  # evicts b
    with moelora_hf.use_adapters(model, ["a", "c"]):
        got = model(ids).logits
        check(0, "a")
        check(1, "c")
        pool.disable("c")
        assert torch.equal(model(ids).logits[0], got[0])
        disabled = model(ids).logits[1]
    assert torch.equal(disabled, model(ids).logits[1])
    with pytest.raises(KeyError, match="no adapter 'b'"), moelora_hf.use_adapters(model, ["b"]):
        pass


def test_an_update_while_serving(tmp_path):
    """What runs keeps the version that it began with; what begins has the new one."""
    model = make_model(qwen3)
    ids = tokens(rows=2)
    folders = save_adapters(model, tmp_path)
    pool = moelora_hf.load_adapters(model, folders, max_loras=4)
    first, second = (model(ids, adapter_names=[name, None]).logits for name in ("a", "b"))
    with moelora_hf.use_adapters(model, ["a", None]):
        assert pool.update("a", folders["b"]) == 2
        assert torch.equal(model(ids).logits, first)
        with moelora_hf.use_adapters(model, ["a", None]):
            assert torch.equal(model(ids).logits, second)
        assert torch.equal(model(ids).logits, first)
    assert torch.equal(model(ids, adapter_names=["a", None]).logits, second)
    assert pool.version("a") == 2 and pool.version("b") == 1


def test_contexts_nest_and_end():
    model = make_model(mixtral)
    other = make_model(mixtral)
    ids = tokens(rows=1)
    layers = [layer for _, layer in moelora_hf.moe_layers(model).values()]
    torch.manual_seed(0)
    state = {
        f"{layer.name}.{n}.{p}_proj.lora_{side}.weight": torch.randn(shape)
        for layer in layers
        for n in range(layer.num_experts)
        for p, wide, tall in (("up", 32, 24), ("down", 24, 32))
        for side, shape in (("A", (2, wide)), ("B", (tall, 2)))
    }
    pool = moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=2)
    pool.add("x", state, config={"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    other.set_experts_implementation("moelora")
    base = model(ids).logits
    with moelora_hf.use_adapters(model, ["x"]):
        adapted = model(ids).logits
        with moelora_hf.use_adapters(model, [None]):
            assert torch.equal(model(ids).logits, base)
        assert torch.equal(model(ids).logits, adapted)
        assert torch.equal(other(ids).logits, base), "another model has no adapters"
    assert torch.equal(model(ids).logits, base)
    assert not torch.allclose(adapted, base)
    embedded = model.get_input_embeddings()(ids)
    with moelora_hf.use_adapters(model, ["x"]):
        assert torch.equal(model(inputs_embeds=embedded).logits, adapted)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(ids).logits, base), "a copy has no adapters"
    moelora_hf.unload_adapters(model)
    assert torch.equal(model(ids).logits, base)


def test_misuse(tmp_path):
    model = make_model(mixtral)
    folder = save_adapter(model, tmp_path / "a", 0)
    with pytest.raises(RuntimeError, match="has no adapters; call load_adapters first"):
        with moelora_hf.use_adapters(model, ["a"]):
            pass
    with pytest.raises(ValueError, match="wanted a mapping or a list of folders"):
        moelora_hf.load_adapters(model, str(folder))
    with pytest.raises(ValueError, match=r"called \['a', 'a'\], two the same"):
        moelora_hf.load_adapters(model, [folder, folder])
    with pytest.raises(ValueError, match="name is '__base__', which stands for no adapter"):
        moelora_hf.load_adapters(model, {"__base__": folder})
    with pytest.raises(ValueError, match="2 adapters do not fit into max_loras=1"):
        moelora_hf.load_adapters(model, {"a": folder, "b": folder}, max_loras=1)
    for wrong in (0, "8", True):
        with pytest.raises(ValueError, match=f"max_loras is {wrong!r}, wanted an integer >= 1"):
            moelora_hf.load_adapters(model, {"a": folder}, max_loras=wrong)
    for wrong, why in (
        ({"adapters": None}, "adapters is 'None', wanted a mapping or a list of folders"),
        ({"adapters": [None]}, "adapters has None, wanted folders, or ids of the Hub"),
        ({"adapters": {"a": 3}}, "adapters has 3, wanted folders, or ids of the Hub"),
        ({"targets": []}, r'targets is \[\], wanted "all" or a list of names'),
        ({"targets": 3}, 'targets is 3, wanted "all" or a list of names'),
        ({"layout": 3}, "layout is 3, wanted one of"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora_hf.load_adapters(**{"model": model, "adapters": {"a": folder}, **wrong})
    moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(RuntimeError, match="the model has a pool already"):
        moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(ValueError, match="names is the string 'a'"):
        with moelora_hf.use_adapters(model, "a"):
            pass
    for wrong in (0, "2", True, 1.5):
        with pytest.raises(ValueError, match=f"expand is {wrong!r}, wanted an integer >= 1"):
            with moelora_hf.use_adapters(model, ["a"], expand=wrong):
                pass
    with pytest.raises(ValueError, match="names is 3, wanted a list of names"):
        model(tokens(rows=1), adapter_names=3)
    with pytest.raises(ValueError, match="names 1 rows, the model was called with 2"):
        with moelora_hf.use_adapters(model, ["a"]):
            model(tokens(rows=2))
    with pytest.raises(RuntimeError, match="call the model that was given to use_adapters"):
        with moelora_hf.use_adapters(model, ["a"]):
            model.model(tokens(rows=1))
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="experts_implementation='eager', which knows no"):
        with moelora_hf.use_adapters(model, ["a"]):
            pass
    odd = mixtral()
    odd.hidden_act = "gelu"
    odd = transformers.AutoModelForCausalLM.from_config(odd)
    with pytest.raises(NotImplementedError, match="activation of its gate of MixtralExperts"):
        moelora_hf.load_adapters(odd, {"a": folder})
    dense = transformers.LlamaConfig(**SIZES, intermediate_size=24)
    dense = transformers.AutoModelForCausalLM.from_config(dense)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        moelora_hf.load_adapters(dense, {"a": folder})
    with pytest.raises(ValueError, match="is wrapped by PEFT"):
        moelora_hf.load_adapters(with_peft(model, folder), {"a": folder})
