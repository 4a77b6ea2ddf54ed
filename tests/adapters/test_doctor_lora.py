"""`moelora doctor --lora`: adapters that load without an error and change nothing are found."""

import pathlib
import re

import pytest
import torch
from dialects import DIALECTS, draw, renamed, rewrite
from hf_models import transformers  # noqa: F401, skips where there is none
from small_models import config, make

from moelora.__main__ import main
from moelora.integrations.transformers import tiny


@pytest.fixture
def ask(tmp_path, capsys):
    """Runs the command on an adapter whose tensors and options are changed; (exit status, what it
    says)."""

    def run(model_type, dialect, *words, change=None, **options):
        dialect = DIALECTS[dialect]
        drawn = draw(make(model_type), dialect.kind)
        folder = dialect.write(tmp_path / "a", drawn)
        rewrite(folder, change, **options)
        config(model_type).save_pretrained(tmp_path / "model")
        status = main(["doctor", "--lora", str(folder), "--model", str(tmp_path / "model"), *words])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("engine", "model_type", "dialect"),
    [
        ("vllm", "qwen3_moe", "per-expert"),
        ("vllm", "qwen3_5_moe_text", "peft"),  # stacks, as the engine keeps them
        ("sglang", "qwen3_moe", "per-expert"),
        ("sglang", "gpt_oss", "per-expert"),
        ("transformers", "gpt_oss", "peft"),
        ("transformers", "gemma4_text", "peft"),
    ],
)
def test_an_adapter_that_an_engine_uses(ask, engine, model_type, dialect):
    status, text = ask(model_type, dialect, "--engine", engine)
    assert status == 0, text
    assert "tensors are used" in text and "ignored" not in text
    count, every = re.search(r"without: (\d+) of (\d+) layers differ", text).groups()
    assert count == every


# Public reports of adapters that were served as the base model, rebuilt: the model, the dialect,
# what names became, what an engine makes of them, and words of the reason.
IN_A_BLOCK = renamed(r"\.experts\.", ".moe.experts.")
IN_A_PART = renamed(r"\.model\.layers\.", ".model.language_model.layers.")
MISSPELT = renamed(r"layers\.1\.mlp\.experts\.base_layer", "layers.1.mlp.expert.base_layer")
REPORTS = {
    # Gemma-4: an adapter's names have a part that no module of the release has
    "vllm#41754": (
        *("gemma4_text", "per-expert", IN_A_BLOCK, "ignored"),
        "only vLLM 0.28 calls a module so",
    ),
    "vllm#41754, a multimodal model's names": (
        *("qwen3_moe", "per-expert", IN_A_PART, "ignored"),
        "vLLM has no module model.language_model.layers.0",
    ),
    # Gemma-4: stacks of experts, which the mapping of names does not reach
    "vllm#50252": (
        *("gemma4_text", "peft", IN_A_BLOCK, "ignored"),
        "per-expert OUT writes one pair per expert",
    ),
    # stacks of experts for a model that has them one by one
    "unsloth-zoo#1250": ("qwen3_moe", "peft", None, "refused", "keeps the experts of qwen3_moe"),
    # stacks are served where the engine has stacks, so that each name has to be looked up
    "unsloth-zoo#1267": (
        *("qwen3_5_moe_text", "peft", MISSPELT, "ignored"),
        "vLLM has no module model.layers.1.mlp.expert.base_layer",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports_of_adapters_that_change_nothing(ask, report):
    model_type, dialect, change, what, why = REPORTS[report]
    status, text = ask(model_type, dialect, "--engine", "vllm", change=change)
    assert status == 1
    lines = [line for line in text.splitlines() if line.startswith(f"  {what}: ")]
    assert any(why in line for line in lines), text


def exchanged(part):
    """The factors of a parameter that one version has as (in, out), another as (out, in)."""

    def change(state):
        for key in [key for key in state if f"{part}.lora_A" in key]:
            other = key.replace("lora_A", "lora_B")
            state[key], state[other] = state[other].T, state[key].T

    return change


def zero(part):
    def change(state):
        for key in state:
            if part in key:
                state[key].zero_()

    return change


def disjoint(state):
    """Ranks that have one factor each."""
    for key in state:
        if "o_proj" in key:
            first, second = state[key].chunk(2, 1 if "lora_B" in key else 0)
            (first if "lora_B" in key else second).zero_()


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("engine", "change", "status", "says"),
    [
        ("vllm", exchanged("layers.0.self_attn.k_proj"), 1, "misread: .*k_proj.*are exchanged"),
        ("vllm", exchanged("experts.1.up_proj"), 1, "misread: .*up_proj.*A and B are exchanged"),
        ("sglang", exchanged("layers.0.self_attn.k_proj"), 1, "misread: .*k_proj.*are exchanged"),
        ("sglang", exchanged("experts.1.up_proj"), 1, "misread: .*up_proj.*A and B are exchanged"),
        ("vllm", renamed("base_model.model.", "base_model.model._orig_mod."), 1, "ignored"),
        ("vllm", renamed("lora_A.weight", "lora_A.default.weight"), 1, "refused"),
        ("vllm", renamed(r"layers\.1", "layers.7"), 1, "ignored: .*layers.7"),
        ("vllm", renamed("o_proj", "wo"), 1, "refused: .*self_attn.wo"),
        ("vllm", renamed(r"experts\.3\.up", "experts.3.uq"), 1, "no factors of 3.up"),
        ("vllm", renamed("model.model.layers", "model.model.visual.layers"), 1, "a tower"),
        ("sglang", renamed(r"layers\.1", "layers.7"), 1, "has layers 0 to 1"),
        ("sglang", renamed(r"\.layers\.", ".blocks."), 1, "ignored: .*no number of a layer"),
        ("sglang", renamed("self_attn", "tower"), 1, "misread: .*SGLang adds it to"),
        ("sglang", renamed(r"experts\.3", "experts.9"), 1, "has experts 0 to 5"),
        ("sglang", {"target_modules": PROJECTIONS}, 1, "both gate_up and down"),
        ("vllm", zero("o_proj.lora_B"), 0, r"1.self_attn.o_proj does not: lora_B is z"),
        ("vllm", zero("o_proj.lora_A"), 0, r"o_proj does not: lora_A is zero"),
        ("vllm", disjoint, 0, r"o_proj does not: no rank has both factors"),
        ("vllm", zero("lora_B"), 1, "0 of 14 layers differ"),
        ("vllm", zero("experts"), 0, "1.mlp.experts .*: down: .* zero; gate: .*; up: "),
    ],
)
def test_what_is_said_of_an_adapter(ask, engine, change, status, says):
    """`change`: of its tensors, or other options."""
    options = change if isinstance(change, dict) else {"change": change}
    got, text = ask("qwen3_moe", "per-expert", "--engine", engine, **options)
    assert re.search(says, text), text
    assert got == status


def test_a_layer_that_the_forward_does_not_run_is_named(ask, monkeypatch):
    """Factors that are not zero, of a layer whose output stays."""
    monkeypatch.setattr(tiny, "load_adapters", lambda model, folders: load_none(model, folders))

    def load_none(model, folders):
        from moelora.integrations.transformers import load_adapters

        rewrite(pathlib.Path(folders["a"]), zero(""))
        load_adapters(model, folders)

    status, text = ask("qwen3_moe", "per-expert", "--engine", "vllm")
    assert status == 1
    assert "o_proj does not: a forward of text does not run it, or its output is the same" in text


def test_the_model_is_the_one_that_the_adapter_names(tmp_path, capsys):
    model = make("qwen3_moe")
    folder = DIALECTS["per-expert"].write(tmp_path / "a", draw(model, "split"))
    words = ["doctor", "--lora", str(folder), "--engine", "vllm"]
    assert main(words) == 2
    assert "moelora doctor: --lora needs --model: " in capsys.readouterr().err
    rewrite(folder, base_model_name_or_path=str(tmp_path / "model"))
    config("qwen3_moe").save_pretrained(tmp_path / "model")
    assert main(words) == 0
    assert main(["doctor", "--engine", "vllm"]) == 2
    assert "--engine needs --lora" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--model", "nowhere"], ["--lora", "nowhere"]])
def test_what_is_not_there(ask, tmp_path, capsys, words):
    assert ask("qwen3_moe", "per-expert", *words)[0] == 2


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid"])
def test_a_small_model_has_the_layers_of_the_large_one(model_type):
    large = transformers.AutoConfig.for_model(model_type)
    small = tiny.shrunk(large)
    models = [tiny.empty_model(one) for one in (large, small)]
    assert [*dict(models[0].named_modules())] == [*dict(models[1].named_modules())]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes[0] > 20 * sizes[1] and sizes[1] < 20_000_000
    assert large.hidden_size > small.hidden_size, "the configuration that is given stays"
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(small)
        assert model(torch.ones(1, 4, dtype=torch.int64), use_cache=False).logits.isfinite().all()
