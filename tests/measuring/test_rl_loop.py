"""`benchmarks.rl_loop`: its cases with either sampler, of which vLLM is a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("peft")
rl_loop = pytest.importorskip("benchmarks.rl_loop")

import moelora.integrations.transformers as mt  # noqa: E402
from moelora.__main__ import main  # noqa: E402
from moelora.bench import results  # noqa: E402
from moelora.integrations import vllm  # noqa: E402


class LLM:
    """vLLM's, with a model of transformers in it; calls are those of vLLM 0.33."""

    def __init__(self, model, load_format=None, **options):
        self.llm_engine, self.left = self, 0
        self.sampler = None if load_format == "dummy" else rl_loop.Transformers(model, None)

    def generate(self, prompts, sampling_params, *, use_tqdm, lora_request=None):
        new = sampling_params["max_tokens"]
        tokens, said, experts = self.sampler.sample(len(prompts), new)
        for row, values, routed in zip(tokens[:, -new:].tolist(), said, experts, strict=True):
            each = [{t: SimpleNamespace(logprob=v)} for t, v in zip(row, values, strict=True)]
            one = SimpleNamespace(token_ids=row, logprobs=each, routed_experts=routed.numpy())
            yield SimpleNamespace(outputs=[one])

    def add_request(self, request_id, prompt, params, *, lora_request):
        assert lora_request == "law"
        self.left += 1

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        self.left -= 1


UPDATES = "rl_update idle|rl_update under load"
CASES = "rl_gap usual|rl_memory|rl_memory|rl_gap shared|rl_gap shared, replayed"
CASES += "|rl_reward|rl_reward|rl_phase"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--formats bf16 --sampler transformers", CASES),
        ("--formats bf16", f"{CASES}|{UPDATES}"),
        ("--formats updates", UPDATES),  # needs no checkpoint
    ],
)
def test_its_cases(monkeypatch, tmp_path, words, wanted):
    stand_in = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(vllm, "update_adapters", lambda llm, adapters: {n: n for n in adapters})
    monkeypatch.setattr(mt, "share_experts", lambda model, llm: None)
    out = tmp_path / "rl.json"
    words += f" --preset micro --layers 1 --group 4 --new 3 --steps 2 --every 0 --out {out}"
    assert rl_loop.main(words.split()) == 0
    cases = results.read(out)[1]
    found = [f"{c['topic']} {c.get('pair', c.get('what', ''))}".strip() for c in cases]
    assert found == wanted.split("|")
    assert all(c["mean"] < 0.05 for c in cases if c.get("pair") == "shared, replayed")
    assert all(0 < c["low"] <= c["ms"] <= c["high"] for c in cases if c["topic"] == "rl_update")
    if "rl_gap" in wanted:
        pytest.importorskip("matplotlib")
        assert main(["plot", "--picture", "rl", str(out), "-o", str(tmp_path / "rl.svg")]) == 0
