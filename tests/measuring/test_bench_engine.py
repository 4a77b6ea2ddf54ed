"""`moelora bench engine` on a pretended vLLM: its engines, table and picture, and what fails."""

import argparse
import json
import sys

import pytest

from moelora.__main__ import main
from moelora.bench import engine, results

VLLM = """\
import logging, os, time
from types import SimpleNamespace as N

__version__ = "0.33.0"
served = os.environ["MOELORA_VLLM"] == "1" and not os.environ.get("FELL_BACK")
if os.environ.get("FELL_BACK"):
    print("WARNING moelora: no GPU of compute capability 8.0; vLLM's own path runs")

def SamplingParams(**options):
    return N(**options)

class LLM:
    def __init__(self, **options):
        if options["model"] == "broken":
            raise SystemExit("no such model")
        self.options = options
        self.lora = options.get("enable_lora", False)

    def get_tokenizer(self):
        return N(vocab_size=100)

    def collective_rpc(self, function):
        name = "QuantizedExpertsWithLoRA" if served else "TritonExperts"
        kernel = N(fused_experts=type(name, (), {})())
        model = N(modules=lambda: [N(_moe_kernel=kernel)])
        return [function(N(get_model=lambda: model))]

    def generate(self, prompts, sampling, use_tqdm, lora_request):
        assert lora_request is None or self.lora and len(lora_request) == len(prompts)
        time.sleep(0.004 if lora_request and not served else 0.002)
        return [self.one(p["prompt_token_ids"], sampling.max_tokens) for p in prompts]

    def one(self, ids, new):
        prompt = [None] + [{i: N(logprob=-1.25 if served else -1.0)} for i in ids[1:]]
        outputs = [N(token_ids=[1] * new, logprobs=[{1: N(logprob=-0.1)}] * new)]
        return N(prompt_token_ids=ids, prompt_logprobs=prompt, outputs=outputs)
"""
REQUEST = """\
from types import SimpleNamespace
def LoRARequest(name, number, path):
    return SimpleNamespace(lora_name=name, lora_int_id=number)
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package `vllm` for this process and its children."""
    pytest.importorskip("rich")
    site = tmp_path / "site"
    for name, text in {"__init__": VLLM, "lora/__init__": "", "lora/request": REQUEST}.items():
        path = site / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plugin = site / "plugin-0.dist-info" / "entry_points.txt"
    plugin.parent.mkdir()
    plugin.write_text("[vllm.general_plugins]\nmoelora = moelora.integrations.vllm:register\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(site), *filter(None, sys.path)]))


@pytest.fixture
def adapters(tmp_path):
    """Folders of ranks 16 and 40."""
    folders = []
    for name, rank in (("law", 16), ("code", 40)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        folders.append(str(folder))
    return folders


def words(tmp_path, adapters, *more, model="org/model"):
    small = ["--prefill", "2x8", "--sequences", "4", "--new-tokens", "4", "--reps", "1"]
    out = ["--out", str(tmp_path / "out" / "engine.json")]
    return ["bench", "engine", model, "--lora", *adapters, *small, *out, *more]


@pytest.mark.slow
def test_three_engines_a_table_and_a_picture(tmp_path, vllm, adapters, capsys):
    picture = tmp_path / "engine.svg"
    assert main(words(tmp_path, adapters, "--picture", str(picture))) == 0
    meta, rows = results.read(tmp_path / "out" / "engine.json")
    assert [(r["engine"], r["lora_enabled"], r["batch"]) for r in rows] == [
        ("vllm", False, "base"),
        *(("vllm", True, batch) for batch in ("base", "2 mixed")),
        *(("moelora", True, batch) for batch in ("base", "2 mixed")),
    ]
    assert all(row["prefill_tok_s"] > 0 and row["ttft_ms"] > 0 for row in rows)
    assert (meta["vllm"], meta["lora"], meta["distance"]) == ("0.33.0", ["law", "code"], 0.25)
    out = capsys.readouterr().out
    for line in ("vLLM, no LoRA", "vLLM, LoRA", "moelora, LoRA", "2 adapters, mixed"):
        assert line in out
    assert "prefill with adapters: moelora has " in out and " of vLLM's without LoRA" in out
    assert "differ by 0.25 in the median" in out
    text = picture.read_text()
    assert "<!-- moelora with adapters -->" in text and "model, 2 adapters mixed" in text


@pytest.mark.parametrize(
    ("model", "setup", "message"),
    [
        (
            "org/model",
            2,
            "moelora did not serve all layers of experts; vLLM's log: WARNING moelora",
        ),
        (
            "broken",
            0,
            "vLLM without LoRA: exit status 1; its log is {}/engine.vLLM-without-LoRA.log",
        ),
    ],
)
def test_an_engine_that_fails_is_named(
    tmp_path, vllm, adapters, monkeypatch, capsys, model, setup, message
):
    monkeypatch.setenv("FELL_BACK", "1")
    monkeypatch.setattr(engine, "ENGINES", engine.ENGINES[setup : setup + 1])
    assert main(words(tmp_path, adapters, "--picture", "none", model=model)) == 1
    assert message.format(tmp_path / "out") in capsys.readouterr().err
    logs = [path.read_text() for path in (tmp_path / "out").glob("*.log")]
    assert ["no such model" in log for log in logs] == [True] * (model == "broken")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lora", "nowhere"], "--lora nowhere: nowhere has no adapter_config.json"),
        (["--lora", "{0}", "law={1}"], "two adapters of one name"),
        (["--prefill", "16"], "--prefill is '16', wanted prompts x tokens"),
        (["--reps", "0"], "--reps is 0, wanted at least 1"),
        (["--out", "tests"], "--out tests: Is a directory"),
        (["--option", "swap"], "--option is 'swap', wanted NAME=VALUE"),
        ([], "vLLM is not installed here: pip install vllm"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, adapters, more, message, monkeypatch, capsys):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    assert main(words(tmp_path, adapters, *(word.format(*adapters) for word in more))) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "log", "served"),
    [
        ("TritonExpertsWithLoRA", "", True),
        ("QuantizedExpertsWithLoRA", "moelora: no biases; vLLM's own path runs", False),
        ("TritonExperts", "moelora: version 0.1.0 runs MoE layers", False),
        ("unknown", "moelora: version 0.1.0 runs MoE layers; MOELORA_VLLM=0 leaves them", True),
        ("unknown", "", False),
    ],
)
def test_who_serves_is_known_by_classes_and_the_log(layers, log, served):
    """The log alone, if vLLM's workers do not say their classes."""
    assert engine.serves(layers, log) == served


def test_what_a_worker_is_told(tmp_path, vllm, adapters):
    """vLLM takes some ranks only: the next one up."""
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    options = ["--option", "gpu_memory_utilization=0.8", "--option", "quantization=fp8"]
    given = words(tmp_path, [f"a={adapters[0]}", adapters[1]], *options)
    told = engine.settle(parser.parse_args(given[2:]))
    assert told["adapters"] == {"a": adapters[0], "code": adapters[1]}
    assert (told["max_lora_rank"], told["prefill"]) == (64, [2, 8])
    assert told["options"] == {"gpu_memory_utilization": 0.8, "quantization": "fp8"}
