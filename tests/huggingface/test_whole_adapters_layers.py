"""Which layers of a model adapters are served in, which are refused and how a pool has room."""

import copy
import types

import pytest
import small_models
import torch
from adapter_cases import write
from conftest import needs_gpu
from hf_models import make_model, save_adapter, tokens, transformers, with_peft
from linear_cases import pair
from torch import nn
from whole_models import (
    ROWS,
    make_whole_model,
    merged,
    relative,
    served,
    wanted_logits,
    write_adapter,
    write_adapters,
)

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.linears import linear_layers
from moelora.training import Tenants

pytestmark = pytest.mark.usefixtures("no_grad")


# ---- room in the pool ----


def test_only_layers_with_factors_get_room(tmp_path):
    model, _, folders = served(tmp_path)
    pool = moelora_hf.load_adapters(model, {"attention": folders["attention"]}, max_loras=2)
    assert not pool.layers, "no adapter has factors of experts"
    served_here = {name.rpartition(".")[2] for name in pool.linears}
    assert served_here == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    assert (pool.max_rank, pool.max_linear_rank) == (16, 6)
    hooked = [name for name, module in model.named_modules() if module._forward_hooks]
    assert sorted(hooked) == sorted(pool.linears), "others run as before"
    for name in ("mlp", "all"):
        with pytest.raises(ValueError, match="layers.1.mlp.experts, .*no room for.*targets="):
            pool.add(name, folders[name])
    assert pool.names() == ["attention"]


def test_targets(tmp_path):
    """Room for adapters to come: of all layers, or of those of these names."""
    model, ids, folders = served(tmp_path)
    wanted = wanted_logits(model, folders, ROWS, ids)
    for targets in ("all", None):
        pool = moelora_hf.load_adapters(
            model, {}, max_loras=3, max_rank=4, max_linear_rank=6, w13_slices=2, targets=targets
        )
        pointers = [t.data_ptr() for t in pool._tensors()]
        for name, folder in folders.items():
            pool.add(name, folder)
        assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4
        pool.remove("all")
        pool.add("all", folders["all"])
        assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4
        assert [t.data_ptr() for t in pool._tensors()] == pointers
        moelora_hf.unload_adapters(model)
    some = ["experts", "mlp.gate", "layers.0.self_attn.q_proj"]
    pool = moelora_hf.load_adapters(model, {}, max_loras=1, targets=some)
    assert list(pool.layers) == ["model.layers.1.mlp.experts"]
    assert list(pool.linears) == ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate"]
    moelora_hf.unload_adapters(model)
    with pytest.raises(ValueError, match="targets names 'q', which no layer that is served is cal"):
        moelora_hf.load_adapters(model, {}, targets=["q"])


@pytest.mark.parametrize(
    ("first", "ranks", "expected"),
    [
        ((), {}, (16, 16)),
        ((), {"max_rank": 8}, (8, 8)),
        ((), {"max_rank": 8, "max_linear_rank": 6}, (8, 6)),
        (("attention",), {"max_rank": 8}, (8, 8)),
        (("attention",), {"max_rank": 4}, (4, 6)),  # no less than the adapters need
        (("attention",), {"max_linear_rank": 8}, (16, 8)),
    ],
)
def test_max_rank_is_the_limit_of_every_layer(first, ranks, expected, tmp_path):
    model, ids, folders = served(tmp_path)
    ranks |= {"w13_slices": 2, "targets": "all"}
    pool = moelora_hf.load_adapters(model, {n: folders[n] for n in first}, max_loras=3, **ranks)
    assert (pool.max_rank, pool.max_linear_rank) == expected
    for name in folders.keys() - set(first):
        pool.add(name, folders[name])
    wanted = wanted_logits(model, folders, ROWS, ids)
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4


@torch.enable_grad()
def test_pools_without_adapters_fit_training():
    """Gate and up share an A in what Tenants trains and saves."""
    model = make_whole_model("qwen3_moe").requires_grad_(False)
    Tenants(moelora_hf.load_adapters(model, {}, max_loras=2, max_rank=4)).close()


def test_ranks_and_numbers_that_do_not_fit(tmp_path):
    model, _, folders = served(tmp_path)
    with pytest.raises(ValueError, match="rank 6.* max_linear_rank"):
        moelora_hf.load_adapters(model, folders, max_linear_rank=4)
    large = write_adapter(model, tmp_path / "large", 1, lambda name: name == "lm_head", alpha=10**6)
    model = model.half()
    with pytest.raises(ValueError, match="lora_B of lm_head overflows torch.float16"):
        moelora_hf.load_adapters(model, {"large": large})
    assert getattr(model, "_moelora", None) is None
    assert not model.lm_head._forward_hooks


# ---- layers that are refused, by name, before anything runs ----


def empty(config, cls=transformers.AutoModelForCausalLM):
    with torch.device("meta"):
        return cls.from_config(config)


def refusals(model, experts=None):
    layers = linear_layers(model, moelora_hf.moe_layers(model) if experts is None else experts)
    return {name: linear.refusal for name, linear in layers.items() if linear.refusal}


def test_layers_that_compute_something_else(tmp_path):
    model = make_model("deepseek_v4")
    assert set(refusals(model)) == {f"model.layers.{n}.self_attn.o_a_proj" for n in range(2)}
    name = "model.layers.0.self_attn.o_a_proj"
    module = model.get_submodule(name)
    folder = write(tmp_path / "a", pair(name, module.in_features, module.out_features)[0])
    with pytest.raises(ValueError, match=f"'a': factors of {name}, a DeepseekV4Grouped"):
        moelora_hf.load_adapters(model, {"a": folder})


def test_layers_of_other_tokens():
    """Those of images and sounds are none of the batch's rows."""
    config = transformers.Qwen3VLMoeConfig()
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    config.vision_config.deepstack_visual_indexes = [0]
    refused = refusals(empty(config, transformers.AutoModelForImageTextToText))
    assert "model.visual.blocks.0.attn.qkv" in refused
    assert not any("language_model" in name or name == "lm_head" for name in refused)
    assert "outside model.language_model" in refused["model.visual.blocks.0.attn.qkv"]


def test_layers_whose_weight_others_read():
    """LongCat's router multiplies by the weight of a linear layer that it never calls."""
    config = transformers.LongcatFlashConfig(num_layers=1, n_routed_experts=1, zero_expert_num=0)
    assert refusals(empty(config), []) == {
        "model.layers.0.mlp.router.classifier": (
            "whose weight LongcatFlashTopkRouter reads without calling the layer"
        )
    }


def test_layers_of_some_of_the_tokens():
    """Experts in modules of their own take those tokens that the router gives them."""
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    why = "of experts that do not go through transformers' experts interface"
    assert refusals(model, []) == {"mlp.experts.0": why}


def test_layers_that_peft_has_wrapped(tmp_path):
    model = make_model("mixtral")
    targets = {"target_modules": ["o_proj"], "target_parameters": None}
    folder = save_adapter(model, tmp_path / "a", 1, **targets)
    with pytest.raises(ValueError, match="layers.0.self_attn.o_proj is wrapped by PEFT"):
        moelora_hf.load_adapters(with_peft(model, folder), {"a": folder})


def test_tensor_parallel_models_of_other_releases(tmp_path):
    model = make_whole_model("mixtral")
    folder = write_adapters(model, tmp_path)["attention"]
    model._tp_size = 2
    with pytest.raises(NotImplementedError, match="tensor parallel by transformers"):
        moelora_hf.load_adapters(model, {"a": folder})


@torch.enable_grad()
def test_gradients_pass_served_adapters(tmp_path):
    """Of what the model is given; the factors of a pool are constants, and experts are frozen."""
    model, ids, folders = served(tmp_path, rows=1)

    def gradient(model, **names):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, **names).logits
        (logits * torch.linspace(0, 1, logits.numel()).view_as(logits)).sum().backward()
        return embedded.grad

    wanted = {name: gradient(merged(model, folders[name])) for name in ("attention", "mlp")}
    moelora_hf.load_adapters(model, {name: folders[name] for name in wanted})
    with pytest.raises(RuntimeError, match=r"gate_up_proj requires a gradient.* torch.no_grad\(\)"):
        model(ids, adapter_names=["mlp"])
    moelora_hf.enable(model, training=True)
    for name, want in wanted.items():
        assert relative(gradient(model, adapter_names=[name]), want) < 1e-5


def even():
    """A qwen3_moe of which each matmul sums over a multiple of 4, also in the backward pass."""
    return small_models.config("qwen3_moe", vocab_size=64, num_experts=8)


@pytest.mark.parametrize("company", ["pool", "batch", "gradient"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@torch.enable_grad()
def test_factors_and_gradients_that_are_not_finite_stay_alone(autocast, company, device, tmp_path):
    """In deltas that torch computes, a row has the bits that it has beside finite neighbors.

    Sizes are multiples of 4: on CPUs with AMX torch's bfloat16 matmul reads rows of other lengths
    with the first numbers of the next one, and multiplies these by zero.
    """
    model = make_whole_model(even, device=device).requires_grad_(False)
    ids = tokens(4, length=8).to(device)
    if device == "cuda":  # where experts have no float32 kernels
        model = model.bfloat16()
    folder = write_adapter(
        model, tmp_path / "a", 1, lambda n: n.endswith(("q_proj", "embed_tokens"))
    )
    rows = ["a", None if company == "pool" else "b", None, "a"]
    own = [0, 2, 3]
    found = []
    for broken in (False, True):
        served = copy.deepcopy(model)
        pool = moelora_hf.load_adapters(served, {"b": folder, "a": folder})
        moelora_hf.enable(served, training=True)
        factors = [f[s] for f in served._moelora.linears.values() for s in ("lora_a", "lora_b")]
        if broken and company != "gradient":
            for factor in factors:
                factor[pool.lookup("b")] = float("nan")
        for factor in factors:
            factor.requires_grad_()
        embedded = []
        embed = served.get_input_embeddings()
        embed.register_forward_hook(lambda _, __, out: embedded.append(out) or out.retain_grad())  # noqa: B023
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = served(ids, adapter_names=rows).logits
        weights = torch.linspace(0, 1, logits.numel(), device=device).view_as(logits).clone()
        if broken and company == "gradient":
            weights[1] = float("nan")
        logits.backward(weights.to(logits.dtype))
        slot = pool.lookup("a")
        found.append(
            [logits[own].detach(), embedded[0].grad[own], *(f.grad[slot] for f in factors)]
        )
    for got, want in zip(*found, strict=True):
        assert want.isfinite().all() and want.any()
        assert torch.equal(got, want)


# ---- models that change ----


def test_modules_in_the_place_of_served_ones(tmp_path):
    """An adapter's factors of a layer must not be lost with the module that added them."""
    model, ids, folders = served(tmp_path, length=4)
    for change, layer in (
        (lambda m: m.resize_token_embeddings(70), "lm_head is a Linear"),
        (lambda m: setattr(m.model.layers[0].self_attn, "q_proj", nn.Identity()), "q_proj is a Id"),
        (lambda m: setattr(m.model.layers[1].mlp, "experts", nn.Identity()), "experts is a Identi"),
        (lambda m: delattr(m.model.layers[0].self_attn, "o_proj"), "o_proj is a NoneType"),
    ):
        changed = copy.deepcopy(model)
        moelora_hf.load_adapters(changed, folders)
        change(changed)
        with pytest.raises(RuntimeError, match=f"{layer}.* that has taken the place"):
            changed(ids, adapter_names=ROWS)
    around = copy.deepcopy(model)
    moelora_hf.load_adapters(around, folders)
    wanted = around(ids, adapter_names=ROWS).logits
    attention = around.model.layers[0].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)  # as those of compilers, profilers, PEFT
    assert torch.equal(around(ids, adapter_names=ROWS).logits, wanted)


def test_embeddings_of_another_size(tmp_path):
    model = make_whole_model("qwen3_moe")
    folder = write_adapter(model, tmp_path / "a", 1, lambda name: "embed_tokens" in name)
    moelora_hf.load_adapters(model, {"a": folder})
    model.resize_token_embeddings(70)
    with pytest.raises(RuntimeError, match="embed_tokens has 70 rows, adapters were loaded for 61"):
        model(tokens(), adapter_names=["a"] * 5)


def test_inputs_of_any_strides(tmp_path):
    """What one row of a batch is transposed to keeps its strides when it is flattened."""
    model, _, folders = served(tmp_path)
    moelora_hf.load_adapters(model, folders)
    ids = tokens(rows=1)
    wanted = model(ids, adapter_names=["all"]).logits
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.register_forward_pre_hook(lambda _, x: x[0].mT.contiguous().mT)
    assert relative(model(ids, adapter_names=["all"]).logits, wanted) < 1e-5


# ---- linear layers that others have quantized ----


class GPTQLinear(nn.Module):
    """As the linear layers of GPTQ: no `weight`, sizes under names of their own."""

    def __init__(self, linear):
        super().__init__()
        self.infeatures, self.outfeatures = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 7
        self.register_buffer("scales", scale.detach())
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8).detach())

    @property
    def meant(self):
        return self.qweight * self.scales

    def forward(self, x):
        return x @ self.meant.T.to(x.dtype)


def test_linear_layers_of_gptq(tmp_path):
    model, ids, folders = served(tmp_path)
    exact = copy.deepcopy(model)
    for name, module in exact.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            quantized = GPTQLinear(module)
            module.weight.copy_(quantized.meant)
            model.set_submodule(name, quantized)
    moelora_hf.load_adapters(model, folders)
    wanted = wanted_logits(exact, folders, ROWS, ids)
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4


def test_linear_layers_of_compressed_tensors(tmp_path):
    """The library runs quantized layers in a `forward` of its own."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model, ids, folders = served(tmp_path)
    exact = copy.deepcopy(model)
    weights = quantization.QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            scale = module.weight.abs().amax(1, keepdim=True) / 127
            module.weight_scale.copy_(scale)
            module.quantization_status = quantization.QuantizationStatus.FROZEN
            meant = (module.weight / scale).round().clamp(-128, 127) * scale
            exact.get_submodule(name).weight.copy_(meant)
    assert relative(model(ids).logits, exact(ids).logits) < 1e-5
    wanted = wanted_logits(exact, folders, ROWS, ids)
    moelora_hf.load_adapters(model, folders)
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4


# ---- devices ----


def test_layers_on_several_devices(tmp_path):
    """One pool, with factors and tables where each layer is; "cpu" and "cpu:0" are two here."""
    model, ids, folders = served(tmp_path, "mixtral")
    wanted = wanted_logits(model, folders, ROWS, ids)
    other = torch.device("cpu", 0)
    for module in model.model.layers[1].modules():
        module._hf_hook = types.SimpleNamespace(execution_device=other)
    pool = moelora_hf.load_adapters(model, folders)
    assert pool.devices == (torch.device("cpu"), other)
    assert pool.places["model.layers.0.mlp.experts"].device == torch.device("cpu")
    assert pool.places["model.layers.1.self_attn.q_proj"].device == other
    assert relative(model(ids, adapter_names=ROWS).logits, wanted) < 1e-4
    pool.disable("all")
    rows = [None if row == "all" else row for row in ROWS]
    assert torch.equal(model(ids, adapter_names=ROWS).logits, model(ids, adapter_names=rows).logits)


def test_offloaded_models(tmp_path):
    """accelerate brings a layer's weights for each call, from memory or from disk."""
    pytest.importorskip("accelerate")
    model, ids, folders = served(tmp_path, "mixtral")
    model.save_pretrained(tmp_path / "model")
    wanted = wanted_logits(model, folders, ROWS, ids)
    base = model(ids).logits
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    parts |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.float32,
        device_map=parts,
        offload_folder=str(tmp_path / "disk"),
        attn_implementation="eager",
    ).eval()
    assert offloaded.model.layers[1].mlp.experts.down_proj.is_meta
    moelora_hf.load_adapters(offloaded, folders)
    assert relative(offloaded(ids, adapter_names=ROWS).logits, wanted) < 1e-4
    assert relative(offloaded(ids).logits, base) < 1e-5


@pytest.mark.gpu
@needs_gpu
def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    model = make_whole_model("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    ids = tokens()
    folders = write_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    wanted = wanted_logits(exact, folders, ROWS, ids)
    naive = wanted_logits(model, folders, ROWS, ids)
    parts = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    parts |= {"model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    spread = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, device_map=parts, attn_implementation="eager"
    ).eval()
    pool = moelora_hf.load_adapters(spread, folders)
    assert len(pool.devices) == 2
    got = spread(ids.cuda(), adapter_names=ROWS).logits.cpu()
    ours, theirs = ((x.float() - wanted).abs().mean(-1) for x in (got, naive))
    assert ours.median() <= 4 * theirs.median()
