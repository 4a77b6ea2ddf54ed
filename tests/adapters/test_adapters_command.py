"""`moelora adapters`: what an adapter is, whether it loads, which key is in the way."""

import functools
import json
import resource
from dataclasses import replace

import pytest
import torch
from dialects import DIALECTS, draw, merge, renamed, rewrite
from hf_models import transformers  # noqa: F401, skips where there is none
from safetensors.torch import load_file, save_file
from small_models import MODELS, SIZES, config, make, tokens
from vllm_names import VLLM

import moelora
import moelora.integrations.transformers as moelora_hf
from moelora.__main__ import main
from moelora.adapters import AdapterPool, LinearLayer, MoELayer
from moelora.adapters.engine_names import names_of
from moelora.adapters.layers import Adapter, LinearPair, Pair
from moelora.adapters.write import per_expert_tensors
from moelora.commands import adapters as command
from moelora.integrations.transformers.empty import empty_model
from moelora.integrations.transformers.linears import linear_layers


@functools.cache
def model_of(model_type):
    return make(model_type)


@functools.cache
def drawn(kind, embeddings=False):
    return draw(model_of("qwen3_moe"), kind, embeddings=embeddings)


@pytest.fixture
def ask(tmp_path, capsys):
    """Runs the command on an adapter in a dialect, changed; (exit status, what it says)."""
    config("qwen3_moe").save_pretrained(tmp_path / "model")

    def run(dialect, *words, change=None, model=True):
        dialect = DIALECTS[dialect]
        folder = dialect.write(tmp_path / "a", drawn(dialect.kind, dialect.embeddings))
        rewrite(folder, change)
        words = [*words, *(["--model", str(tmp_path / "model")] if model else [])]
        status = main(["adapters", str(folder), *words])
        return status, capsys.readouterr().out

    return run


def rewritten(folder, *words, model_type="qwen3_moe"):
    """Exit status of --per-expert, and the folder that it writes."""
    config(model_type).save_pretrained(folder.parent / "model")
    out = folder.parent / "out"
    words = ["--model", str(folder.parent / "model"), "--per-expert", str(out), *words]
    return main(["adapters", str(folder), *words]), out


def logits_of(folder, model_type="qwen3_moe"):
    """Of all rows, with the adapter of a folder."""
    model = make(model_type)
    moelora_hf.load_adapters(model, {"a": folder})
    return model(tokens(), adapter_names=["a"] * len(tokens())).logits


SAYS = {
    "peft": ["PEFT 0.21.2", "PEFT's target_parameters", "rank_major, PEFT's", "embedding"],
    "unsloth-grouped": ["Unsloth with PEFT 0.21.2", "lora_B: grouped_by_expert"],
    "per-expert": ["one pair per expert", "model.layers.N.mlp.experts.N.gate_proj"],
    "lists": ["one pair per expert", "experts.gate_up_projs.N"],
    "tinker": ["stack of experts", "model.unembed_tokens"],
    "in-training": ["_checkpoint_wrapped_module, _fsdp_wrapped_module, _orig_mod", "default"],
    "torch-file": ["adapter_model.bin"],
    "shards": ["adapter_model-00001-of-00002.safetensors"],
}


@pytest.mark.parametrize("dialect", SAYS)
def test_an_adapter_that_loads(ask, dialect):
    status, text = ask(dialect)
    assert status == 0, text
    for words in SAYS[dialect]:
        assert words in text
    assert "Qwen3MoeForCausalLM has 1 layers of experts, 14 linear layers" in text
    assert "load_adapters serves all of the adapter: experts up to rank 4" in text
    assert ("--per-expert OUT writes" in text) == ("stack of experts" in text)


@pytest.mark.parametrize(
    ("patterns", "ranks"),
    [({}, "4"), ({"experts.down_proj": 8}, "4 or 8"), ({r"experts\.\w+": 8}, "8")],
)
def test_ranks_of_stacks_are_those_of_their_parameters(tmp_path, capsys, patterns, ranks):
    dialect = DIALECTS["peft"]
    folder = dialect.write(tmp_path / "a", drawn(dialect.kind, dialect.embeddings))
    main(["adapters", str(rewrite(folder, rank_pattern=patterns))])
    rows = [row for row in capsys.readouterr().out.splitlines() if "stack of experts, PEFT" in row]
    tables = [row for row in rows if row.count("\u2502") > 5]
    assert tables and all(row.rstrip(" \u2502").endswith(f" {ranks}") for row in tables)


def test_without_a_model(ask):
    status, text = ask("peft", model=False)
    assert status == 0
    assert "--model CONFIG compares it with a model's layers" in text


def test_a_layout_that_nobody_can_tell(ask):
    for model in (False, True):
        status, text = ask("unsloth-unmarked", model=model)
        assert status == 1
        assert "problem: Unsloth wrote the adapter before it marked" in text
        assert "columns of lora_B: not known" in text
    status, text = ask("unsloth-unmarked", "--layout", "grouped_by_expert")
    assert status == 0, text


@pytest.mark.parametrize(
    ("model_type", "dialect", "key"),
    [
        ("qwen3_moe", "unsloth-unmarked", "mlp.experts.3.gate_proj"),
        ("qwen3_moe", "tinker", "mlp.experts.3.down_proj"),
        ("gpt_oss", "peft", "mlp.experts.3.up_proj"),
        ("mixtral", "peft", "block_sparse_moe.experts.3.w2"),
        ("gemma4_text", "peft", "model.layers.1.experts.3.down_proj"),
        ("gemma4_text", "peft", "model.layers.1.moe.experts.3.down_proj"),
    ],
)
@torch.no_grad()
def test_one_pair_for_each_expert(tmp_path, capsys, model_type, dialect, key):
    """The adapter that is written computes what the adapter that was read does."""
    dialect = DIALECTS[dialect]
    model = make(model_type)
    factors = draw(model, dialect.kind, embeddings=dialect.embeddings)
    folder = dialect.write(tmp_path / "a", factors)
    words = ["--layout", dialect.layout] if dialect.layout else []
    status, out = rewritten(folder, *words, model_type=model_type)
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"written with one pair for each expert: {out}" in said
    state = load_file(out / "adapter_model.safetensors")
    assert any(f"{key}.lora_B.weight" in name for name in state)
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1, "all files can be read by the same users"
    wanted = merge(model, factors)(tokens()).logits
    torch.testing.assert_close(logits_of(out, model_type), wanted, rtol=1e-4, atol=1e-4)


LAYERS = {"lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}}
LAYERS |= {name: SIZES | MODELS[name] for name in VLLM.keys() & MODELS.keys()}


@pytest.mark.parametrize("model_type", VLLM)
def test_the_names_are_those_of_vllm(model_type):
    """Of all releases: factors of other names are loaded there, and never used."""
    options = LAYERS.get(model_type, {})
    model = empty_model(transformers.AutoConfig.for_model(model_type, **options))
    layers = moelora_hf.moe_layers(model)
    linears = linear_layers(model, layers)
    _, block, (gate, down, up), others = VLLM[model_type]
    names = names_of(model_type)
    for name, (_, layer) in layers.items():
        start = name[: name.index(".", name.index("layers.") + len("layers."))]
        place = ".".join(filter(None, (start, block, "experts")))
        assert names.of(f"{name}.3.x")[0] == f"{place}.3.x"
        written = [
            names.projections[p] for p in ("gate", "down", "up") if p != "gate" or layer.gated
        ]
        assert written == ([gate, down, up] if layer.gated else [down, gate])
        for theirs, vllms in others.items():
            if f"{start}.{theirs}" in linears:
                assert names.of(f"{start}.{theirs}") == [f"{start}.{vllms}"]
    every = {name.split(".", 3)[-1] for name in linears}
    assert others.keys() <= every, "a name that transformers no longer has"


@torch.no_grad()
def test_factors_under_both_names_are_equal(tmp_path):
    """What is written for several releases is read as one, unless the names have other numbers."""
    folder = DIALECTS["per-expert"].write(tmp_path / "a", draw(make("gemma4_text"), "split"))
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    key = next(key for key in state if ".experts.3.up_proj.lora_B" in key)
    second = key.replace(".experts.", ".moe.experts.")
    save_file(state | {second: state[key].clone()}, path)
    model = make("gemma4_text")
    moelora_hf.load_adapters(model, {"a": folder})
    moelora_hf.unload_adapters(model)
    save_file(state | {second: state[key] + 1}, path)
    with pytest.raises(ValueError, match=f"{key} and {second} are the same factor, with other"):
        moelora_hf.load_adapters(model, {"a": folder})


@torch.no_grad()
def test_one_rank_and_one_scaling_for_all_pairs(tmp_path):
    """What vLLM and SGLang do not read, patterns, is in the factors."""
    model = make("qwen3_moe")
    folder = DIALECTS["per-expert"].write(tmp_path / "a", draw(model, "split"))

    def cut(state):
        for name in [name for name in state if "v_proj" in name]:
            state[name] = state[name][:2] if "lora_A" in name else state[name][:, :2]

    rewrite(folder, cut, alpha_pattern={"q_proj": 3}, rank_pattern={"v_proj": 2})
    status, out = rewritten(folder)
    assert status == 0
    written = json.loads((out / "adapter_config.json").read_text())
    assert not written["rank_pattern"] and not written["alpha_pattern"]
    tensors = load_file(out / "adapter_model.safetensors")
    assert {t.size(0) for name, t in tensors.items() if "lora_A" in name} == {written["r"]}
    torch.testing.assert_close(logits_of(folder), logits_of(out), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_projections_without_factors_get_zeros(tmp_path):
    """vLLM reads gate, up and down of all experts of a layer, or none."""
    model = make("qwen3_moe")
    factors = draw(model, "fused")
    for pairs in factors.experts.values():
        del pairs["down"]
    status, out = rewritten(DIALECTS["stacks"].write(tmp_path / "a", factors))
    assert status == 0
    state = load_file(out / "adapter_model.safetensors")
    down = [t for name, t in state.items() if ".experts." in name and "down_proj" in name]
    assert len(down) == 2 * 6 and not any(t.any() for t in down)
    wanted = merge(model, factors)(tokens()).logits
    torch.testing.assert_close(logits_of(out), wanted, rtol=1e-4, atol=1e-4)


def test_a_scaling_that_overflows_is_refused(tmp_path, capsys):
    """Nothing is written: the factor would be infinite."""
    folder = DIALECTS["per-expert"].write(tmp_path / "a", draw(make("qwen3_moe"), "split"))

    def large(state):
        state[next(name for name in state if "q_proj.lora_B" in name)][0, 0] = 60000
        return {name: t.half() for name, t in state.items()}

    rewrite(folder, large, alpha_pattern={"q_proj": 800})
    status, out = rewritten(folder)
    assert status == 1
    text = capsys.readouterr().out
    assert "lora_B of model.layers.0.self_attn.q_proj times 100" in text
    assert "overflows torch.float16" in text
    assert not list(out.glob("*"))


def test_ranks_that_would_be_mostly_padding_are_refused():
    """Experts of rank 1 beside attention of rank 512: a hundred times the adapter."""
    layer, linear = MoELayer("mlp.experts", 64, 2048, 768), LinearLayer("q_proj", 2048, 2048)
    one = torch.zeros(1)
    pair = Pair(one.expand(64, 1, 768), one.expand(64, 2048, 1), [1.0])
    wide = LinearPair(one.expand(512, 2048), one.expand(2048, 512), 1.0)
    adapter = Adapter({layer.name: {"down": pair}}, {linear.name: wide})
    args = {layer.name: layer}, {linear.name: linear}
    with pytest.raises(ValueError, match="q_proj has rank 512, which all pairs get: 1064 MiB"):
        per_expert_tensors(adapter, *args)
    adapter.linears[linear.name] = replace(wide, a=wide.a[:2], b=wide.b[:, :2])
    assert per_expert_tensors(adapter, *args)[0]["r"] == 2


def test_nothing_is_written_for_wrong_arguments(ask, tmp_path, capsys):
    assert ask("peft", "--per-expert", str(tmp_path / "out"), model=False)[0] == 2
    for words in ([str(tmp_path / "a")], [str(tmp_path), "--force"], [""]):
        assert ask("peft", "--per-expert", *words)[0] == 2
    assert ask("peft", "--force")[0] == 2
    before = (tmp_path / "a" / "adapter_config.json").read_text()
    change = renamed("layers.0", "layers.7")
    assert ask("peft", "--per-expert", str(tmp_path / "out"), change=change)[0] == 1
    assert (tmp_path / "a" / "adapter_config.json").read_text() == before
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_replaced_by_force_alone(ask, tmp_path, capsys):
    """And what else it has stays, but not a training state of other factors."""
    out = tmp_path / "out"
    out.mkdir()
    assert ask("per-expert", "--per-expert", str(out))[0] == 0
    status, text = ask("per-expert", "--per-expert", str(out))
    assert status == 2 and not text
    (out / "README.md").write_text("kept")
    (out / "training.json").write_text("{}")
    (out / "adapter_model.safetensors").write_bytes(b"other")
    for words in ([], ["--force"]):
        assert ask("per-expert", "--per-expert", str(out), *words)[0] == (0 if words else 2)
        written = sorted(path.name for path in out.iterdir())
        if not words:
            assert (out / "adapter_model.safetensors").read_bytes() == b"other"
    assert written == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert (out / "README.md").read_text() == "kept"
    assert main(["adapters", str(out)]) == 0
    assert f"moelora {moelora.__version__}, as PEFT 0.19.1 writes" in capsys.readouterr().out
    assert ask("per-expert", "--per-expert", str(out / "README.md"))[0] == 2


def test_a_full_disk_leaves_the_folder(ask, tmp_path, monkeypatch):
    def full(*args, write=command.save):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    out = tmp_path / "out"
    assert ask("per-expert", "--per-expert", str(out))[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(command, "save", full)
    status, text = ask("per-expert", "--per-expert", str(out), "--force")
    assert status == 1 and "adapter_model.safetensors cannot be written" in text
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not list(tmp_path.glob(".saving-*"))


def of_more_experts(state):
    """Stacks of eight experts, for a model of six."""
    for key in [key for key in state if ".experts." in key]:
        side = "A" if "lora_A" in key else "B"
        more = state[key].narrow("BA".index(side) ^ 1, 0, 8)
        state[key] = torch.cat([state[key], more], "BA".index(side) ^ 1)


HEAD = "base_model.model.lm_head"


def put(name, *shape):
    return lambda state: state | {f"{HEAD}.{name}": torch.zeros(shape)}


def without(name):
    return lambda state: {key: t for key, t in state.items() if key != f"{HEAD}.{name}"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            renamed("layers.0", "layers.7"),
            "layers.7.mlp.down_proj.lora_A.weight is not a LoRA factor of a layer of this model: "
            "it is of layer 7, and the model has layers 0 to 1 (layers of multi-token prediction,",
        ),
        (
            renamed("model.model.layers.0", "model.mtp.layers.0"),
            "it is of a layer of multi-token prediction (MTP), which transformers does not load; "
            "take these factors out of the adapter, or train without (exclude_modules)",
        ),
        (
            renamed("model.model.layers.0.mlp", "model.model.visual.blocks.0.mlp"),
            "it is of a vision or audio tower, where no adapters are served; take these factors",
        ),
        (
            renamed("experts.5.", "experts.7."),
            "expert 7 of 6 experts; the adapter is of 8 experts, the model has 6: serve it with "
            "the model that it was trained on, not one with fewer experts (pruned)",
        ),
        (without("lora_B.weight"), f"lm_head.lora_A.weight has no {HEAD}.lora_B."),
        (put("lora_A.weight", 8, 32), "lm_head: A is (8, 32), but its rank by the config"),
        (put("lora_magnitude_vector", 2), "lm_head.lora_magnitude_vector is not a LoRA factor"),
    ],
)
def test_the_key_that_is_in_the_way(ask, change, problem):
    status, text = ask("per-expert", change=change)
    assert status == 1
    assert f"problem: {problem}" in text or problem in text.partition("problem: ")[2]


def test_stacks_of_more_experts_than_the_model_has(ask):
    for dialect in ("peft", "peft-0.18"):
        status, text = ask(dialect, change=of_more_experts)
        assert status == 1
        assert (
            "of rank 4, as the configuration says, it is of 8 experts, and the model has 6" in text
        )


def test_an_option_that_is_not_supported(tmp_path, capsys):
    folder = DIALECTS["per-expert"].write(tmp_path / "a", drawn("split"))
    assert main(["adapters", str(rewrite(folder, modules_to_save=["lm_head"]))]) == 1
    text = capsys.readouterr().out
    assert "problem: option modules_to_save=['lm_head'] is not supported" in text
    assert "one pair per expert" in text, "what can be said is said"


def test_refusals_of_folders_name_the_command(tmp_path):
    folder = DIALECTS["unsloth-unmarked"].write(tmp_path / "a", drawn("fused"))
    with pytest.raises(ValueError, match=rf"adapter 'a': .*; `moelora adapters {folder}` says"):
        moelora_hf.load_adapters(model_of("qwen3_moe"), {"a": folder})
    pool = AdapterPool([MoELayer("model.layers.1.mlp.experts", 6, 32, 24)], 1, 8)
    with pytest.raises(ValueError, match=rf"adapter 'b': .*; `moelora adapters {folder}` says"):
        pool.add("b", folder)


def test_what_is_no_adapter(tmp_path, capsys):
    assert main(["adapters", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert main(["adapters", str(tmp_path)]) == 2
    assert "holds no adapter_model.safetensors" in capsys.readouterr().err
    folder = DIALECTS["per-expert"].write(tmp_path / "a", drawn("split"))
    assert main(["adapters", str(folder), "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist; wanted a config.json" in capsys.readouterr().err


def test_what_files_say_does_not_reach_the_terminal_raw(tmp_path, capsys):
    """Neither what a terminal acts on nor rich's markup."""
    nasty = "\x1b]0;title\x07[bold]x[/bold]\u202e"
    folder = tmp_path / f"dir{nasty.replace('/', '')}"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": nasty}
    keys = [f"base_model.model.{nasty}.lora_{side}.weight" for side in "AB"] + [f"x{nasty}"]
    save_file({key: torch.zeros(4, 4) for key in keys}, folder / "adapter_model.safetensors")
    for more, status in (({}, 1), ({nasty: 1}, 1), (None, 2)):
        if more is None:
            (folder / "adapter_model.safetensors").unlink()
        else:
            (folder / "adapter_config.json").write_text(json.dumps(config | more))
        assert main(["adapters", str(folder)]) == status
        told = "".join(capsys.readouterr())
        assert all(line.isprintable() for line in told.splitlines()), told
        assert r"\x1b]0;title\x07[bold]x" in told
