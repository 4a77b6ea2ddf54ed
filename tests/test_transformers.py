"""`experts_implementation="moelora"` and mixed batches of adapters against transformers + PEFT."""

import copy
import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import moelora.integrations.transformers as moelora_hf  # noqa: E402

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def mixtral():
    return transformers.MixtralConfig(
        **COMMON, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
    )


def qwen3():
    return transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )


def gpt_oss():
    return transformers.GptOssConfig(
        **COMMON, head_dim=8, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
    )


def deepseek_v3():
    return transformers.DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        intermediate_size=40,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


# PEFT looks for the patterns among modules, and so misses those of parameters, which do apply.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")

MODELS = [mixtral, qwen3, gpt_oss, deepseek_v3]
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROWS = ["a", None, "b", "a", "c"]


def make_model(config, dtype=torch.float32):
    """A model whose experts and routers are large enough to matter in the logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name or "lm_head" in name or ".gate.weight" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval().to(dtype)


def tokens(rows=5, length=7):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2, 61, (rows, length), generator=generator)


def save_adapter(model, folder, seed, **options):
    """Lets PEFT make and save an adapter with random factors; returns the folder."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_parameters": TARGETS} | options
    config = peft.LoraConfig(target_modules=[], init_lora_weights=False, **options)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(2)
    wrapped.save_pretrained(folder)
    return folder


ADAPTERS = {
    "a": {"r": 4, "lora_alpha": 8},
    "b": {"r": 8, "lora_alpha": 8, "use_rslora": True},
    "c": {
        "r": 3,
        "lora_alpha": 6,
        "rank_pattern": {"experts.down_proj": 5},
        "alpha_pattern": {"experts.gate_up_proj": 4},
    },
}


def save_adapters(model, folder):
    return {
        name: save_adapter(model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def with_peft(model, folder):
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


@torch.no_grad()
def oracle(model, folders, rows, ids):
    """Logits of a mixed batch, one adapter at a time, through transformers' own experts."""
    logits = model(ids).logits
    for name, folder in folders.items():
        chosen = [i for i, row in enumerate(rows) if row == name]
        if chosen:
            logits[chosen] = with_peft(model, folder)(ids).logits[chosen]
    return logits


@pytest.fixture(params=MODELS, ids=lambda c: c.__name__)
def model(request):
    return make_model(request.param)


# ---- the base model ----


@torch.no_grad()
def test_base_model(model):
    ids = tokens()
    wanted = model(ids).logits
    model.set_experts_implementation("moelora")
    got = model(ids).logits
    assert not torch.equal(wanted, torch.zeros_like(wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def experts_class(has_gate=True, **options):
    @use_experts_implementation(has_gate=has_gate, **options)
    class Experts(torch.nn.Module):
        def __init__(self, config, act="silu", dtype=torch.float32):
            super().__init__()
            self.num_experts = 4
            name = "gate_up_proj" if has_gate else "up_proj"
            up = torch.randn(4, 40 if has_gate else 20, 16, dtype=dtype) / 4
            setattr(self, name, torch.nn.Parameter(up))
            self.down_proj = torch.nn.Parameter(torch.randn(4, 16, 20, dtype=dtype) / 4)
            self.act_fn = ACT2FN[act]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the eager path is not used here")

    return Experts


def call(experts, implementation, ids=None):
    experts.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 16, generator=generator).to(experts.down_proj.dtype)
    if ids is None:
        ids = torch.rand(9, 4, generator=generator).argsort(dim=1)[:, :2]
    # Routers give sentinel ids no weight, and the implementation of older releases counts on it.
    weights = torch.rand(9, 2, generator=generator) * (ids < experts.num_experts)
    with torch.no_grad():
        return experts(hidden, ids, weights)


@pytest.mark.parametrize(
    ("act", "has_gate"),
    [
        ("silu", True),
        ("swish", True),
        ("gelu_pytorch_tanh", True),
        ("gelu_new", True),
        ("gelu_fast", True),
        ("relu2", False),
    ],
)
def test_activations(act, has_gate):
    torch.manual_seed(0)
    experts = experts_class(has_gate)(transformers.MixtralConfig(), act)
    wanted = call(experts, "batched_mm")
    torch.testing.assert_close(call(experts, "moelora"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("act", "has_gate"), [("gelu", True), ("relu", True), ("relu2", True), ("silu", False)]
)
def test_other_activations_are_refused(act, has_gate):
    experts = experts_class(has_gate)(transformers.MixtralConfig(), act)
    act_class = type(experts.act_fn).__name__
    with pytest.raises(NotImplementedError, match=f"of Experts .*act_fn={act_class}.* is none of"):
        call(experts, "moelora")


def test_other_gates_are_refused():
    """Same activation function, but the gate clamps, as DeepSeek-V4's does."""
    experts = experts_class()(transformers.MixtralConfig())
    gate = type(experts)._apply_gate
    type(experts)._apply_gate = lambda self, x: gate(self, x.clamp(max=10.0))
    with pytest.raises(NotImplementedError, match="the activation of its gate of Experts"):
        call(experts, "moelora")


def test_other_modules_are_refused():
    config = transformers.MixtralConfig()
    experts = experts_class()(config)
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="Experts normalises after every expert"):
        call(experts, "moelora")
    experts = experts_class()(config, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"gate_up_proj is torch.float64"):
        call(experts, "moelora")


def test_sentinel_ids_are_skipped():
    torch.manual_seed(0)
    experts = experts_class()(transformers.MixtralConfig())
    ids = torch.tensor([[0, 4], [4, 4], [1, 2]] * 3)
    got = call(experts, "moelora", ids)
    experts._is_expert_parallel = True
    torch.testing.assert_close(got, call(experts, "batched_mm", ids), rtol=1e-4, atol=1e-5)
    assert not got[1].any()


def test_gradients_are_refused(model):
    model.set_experts_implementation("moelora")
    with pytest.raises(RuntimeError, match="no backward pass"):
        model(tokens())
    model.requires_grad_(False)
    model(tokens())


def test_transposed_weights_are_copied_once_and_again_when_they_change():
    model = make_model(gpt_oss)
    ids = tokens()
    with torch.no_grad():
        model.set_experts_implementation("moelora")
        first = model(ids).logits
        experts = [m for m, _ in moelora_hf.moe_layers(model).values()]
        copies = [moelora_hf._copies[m] for m in experts]
        model(ids)
        assert all(moelora_hf._copies[m] is c for m, c in zip(experts, copies, strict=True))
        experts[0].down_proj.mul_(-1)
        changed = model(ids).logits
        assert moelora_hf._copies[experts[0]] is not copies[0]
        assert moelora_hf._copies[experts[1]] is copies[1]
        assert not torch.allclose(first, changed)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(changed, model(ids).logits, rtol=1e-4, atol=1e-4)
    count = len(moelora_hf._copies)
    del experts, copies, model
    gc.collect()
    assert len(moelora_hf._copies) <= count - 2


# ---- adapters ----


@torch.no_grad()
def test_mixed_batch_is_what_peft_computes(model, tmp_path):
    ids = tokens()
    folders = save_adapters(model, tmp_path)
    wanted = oracle(model, folders, ROWS, ids)
    base = model(ids).logits
    pool = moelora_hf.load_adapters(model, folders)
    assert pool.names() == ["a", "b", "c"]
    assert pool.max_rank == 8
    with moelora_hf.use_adapters(model, ROWS):
        got = model(ids).logits
    for i, row in enumerate(ROWS):
        difference = (wanted[i] - base[i]).abs().max()
        assert (difference > 0.1) == (row is not None), "an adapter must be seen in the logits"
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)

    # Rows without an adapter, and everything after the context, are the base model's bits.
    plain = model(ids).logits
    assert torch.equal(got[1], plain[1])
    torch.testing.assert_close(plain, base, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.__name__)
def test_bf16_is_as_close_as_peft_in_bf16(config, tmp_path):
    """Both against PEFT in fp32; mean error, since a router may flip between two equal experts."""
    model = make_model(config, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    ids = tokens(length=16)
    folders = save_adapters(model, tmp_path)
    wanted = oracle(exact, folders, ROWS, ids)
    theirs = (oracle(model, folders, ROWS, ids).float() - wanted).abs().mean()
    moelora_hf.load_adapters(model, folders)
    with moelora_hf.use_adapters(model, ROWS):
        ours = (model(ids).logits.float() - wanted).abs().mean()
    assert ours <= 1.5 * theirs, (ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("config", [mixtral, gpt_oss], ids=lambda c: c.__name__)
def test_generate(config, tmp_path):
    model = make_model(config)
    folders = save_adapters(model, tmp_path)
    ids = tokens(length=4)
    options = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **options)
    beams = model.generate(ids, num_beams=3, num_return_sequences=2, **options)
    for name, folder in folders.items():
        chosen = [i for i, row in enumerate(ROWS) if row == name]
        other = with_peft(model, folder)
        wanted[chosen] = other.generate(ids[chosen], **options)
        pairs = [2 * i + n for i in chosen for n in range(2)]
        beams[pairs] = other.generate(ids[chosen], num_beams=3, num_return_sequences=2, **options)
    moelora_hf.load_adapters(model, folders)
    with moelora_hf.use_adapters(model, ROWS):
        assert torch.equal(model.generate(ids, **options), wanted)
        with pytest.raises(ValueError, match="names 5 rows, the model was called with 15"):
            model.generate(ids, num_beams=3, **options)
    with moelora_hf.use_adapters(model, ROWS, expand=3):
        got = model.generate(ids, num_beams=3, num_return_sequences=2, **options)
    assert torch.equal(got, beams)
    assert len({tuple(row) for row in wanted.tolist()}) == len(ROWS)


@torch.no_grad()
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


@torch.no_grad()
def test_hot_add_while_serving(tmp_path):
    model = make_model(qwen3)
    ids = tokens(rows=2)
    folders = save_adapters(model, tmp_path)
    wanted = {name: oracle(model, folders, [name] * 2, ids) for name in folders}
    pool = moelora_hf.load_adapters(model, {"a": folders["a"]}, max_loras=2, max_rank=8)
    pool.add("b", folders["b"])
    with moelora_hf.use_adapters(model, ["a", "b"]):
        got = model(ids).logits
        torch.testing.assert_close(got[0], wanted["a"][0], rtol=2e-4, atol=2e-4)
        with pytest.raises(RuntimeError, match="all 2 are pinned or in use"):
            pool.add("c", folders["c"])
    pool.lookup("a")
    pool.add("c", folders["c"])  # evicts b
    with moelora_hf.use_adapters(model, ["a", "c"]):
        got = model(ids).logits
        torch.testing.assert_close(got[0], wanted["a"][0], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(got[1], wanted["c"][1], rtol=2e-4, atol=2e-4)
        pool.disable("c")
        assert torch.equal(model(ids).logits[0], got[0])
        disabled = model(ids).logits[1]
    assert torch.equal(disabled, model(ids).logits[1])
    with pytest.raises(KeyError, match="no adapter 'b'"), moelora_hf.use_adapters(model, ["b"]):
        pass


@torch.no_grad()
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


@torch.no_grad()
def test_one_thread_at_a_time(tmp_path):
    model = make_model(mixtral)
    moelora_hf.load_adapters(model, {"a": save_adapter(model, tmp_path / "a", 0)})
    ids = tokens(rows=1)

    def elsewhere(function):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(torch.no_grad()(function)).result()

    def enter():
        with moelora_hf.use_adapters(model, ["a"]):
            return model(ids).logits

    here = enter()
    assert torch.equal(elsewhere(enter), here)
    with moelora_hf.use_adapters(model, ["a"]):
        with pytest.raises(RuntimeError, match="another thread is using adapters"):
            elsewhere(enter)
        with pytest.raises(RuntimeError, match="use_adapters was entered in another thread"):
            elsewhere(lambda: model(ids))
        assert torch.equal(model(ids).logits, here)


@torch.no_grad()
def test_compile(tmp_path):
    """Without a graph break, and adapters change without compiling again."""
    torch.compiler.reset()
    model = make_model(qwen3)
    folders = save_adapters(model, tmp_path)
    ids = tokens()
    moelora_hf.load_adapters(model, folders)
    graphs, compiled_once = [], 0

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (ROWS, ["b"] * 5, [None] * 5):
        with moelora_hf.use_adapters(model, rows):
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
        compiled_once = compiled_once or len(graphs)
        assert len(graphs) == compiled_once
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


@torch.no_grad()
def test_misuse(tmp_path):
    model = make_model(mixtral)
    folder = save_adapter(model, tmp_path / "a", 0)
    with pytest.raises(RuntimeError, match="has no adapters; call load_adapters first"):
        with moelora_hf.use_adapters(model, ["a"]):
            pass
    with pytest.raises(ValueError, match="2 adapters do not fit into max_loras=1"):
        moelora_hf.load_adapters(model, {"a": folder, "b": folder}, max_loras=1)
    moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(RuntimeError, match="the model has a pool already"):
        moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(ValueError, match="names is the string 'a'"):
        with moelora_hf.use_adapters(model, "a"):
            pass
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
    dense = transformers.LlamaConfig(**COMMON, intermediate_size=24)
    dense = transformers.AutoModelForCausalLM.from_config(dense)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        moelora_hf.load_adapters(dense, {"a": folder})
    with pytest.raises(ValueError, match="is wrapped by PEFT"):
        moelora_hf.load_adapters(with_peft(model, folder), {"a": folder})
