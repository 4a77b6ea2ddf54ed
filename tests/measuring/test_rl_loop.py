"""`benchmarks.rl_loop` with an engine: what it asks of vLLM 0.33, and its cases."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("peft")
rl_loop = pytest.importorskip("benchmarks.rl_loop")

import moelora.integrations.transformers as mt  # noqa: E402
from moelora.bench import results  # noqa: E402

WORDS = "--preset micro --layers 1 --formats bf16 --group 4 --new 3 --steps 2 --every 0"


class LLM:
    """vLLM's, with a model of transformers in it; options and calls are those of its sources."""

    def __init__(self, model, *, compilation_config, **options):
        known = "dtype max_model_len skip_tokenizer_init max_num_seqs gpu_memory_utilization "
        known += "enable_lora max_loras max_lora_rank enable_return_routed_experts"
        load = options.pop("load_format", None)
        assert options.keys() - {"enable_prefix_caching"} == set(known.split())
        if options["enable_return_routed_experts"] and not options.get("enable_prefix_caching", 1):
            raise ValueError("AuxOutput Connector requires prefix caching.")
        assert max(compilation_config["cudagraph_capture_sizes"]) <= options["max_num_seqs"]
        self.model, self.llm_engine, self.left = load or rl_loop.trainer(model), self, 0

    def generate(self, prompts, sampling_params, *, use_tqdm, lora_request=None):
        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])
        with mt.record_routing(self.model, len(ids)) as routing:
            options = {"do_sample": True, "max_new_tokens": sampling_params["max_tokens"]}
            options |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 1}
            found = self.model.generate(ids, eos_token_id=None, **options)
        new = found.sequences[:, ids.size(1) :]
        said = rl_loop.logprobs(torch.stack(found.logits, 1), new)
        experts = routing.ids().to(torch.uint8).numpy()
        for row, values, routed in zip(new.tolist(), said.tolist(), experts, strict=True):
            each = [{t: SimpleNamespace(logprob=v)} for t, v in zip(row, values, strict=True)]
            one = SimpleNamespace(token_ids=row, logprobs=each, routed_experts=routed)
            yield SimpleNamespace(outputs=[one])

    def add_request(self, request_id, prompt, params, *, lora_request):
        assert lora_request.startswith("law@")
        self.left += 1

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        self.left -= 1


@pytest.fixture
def engine(monkeypatch):
    """The adapters that it got, and that trainers shared its experts."""
    from moelora.integrations import vllm

    seen = SimpleNamespace(updates=[], shared=[])

    def update_adapters(llm, adapters):
        seen.updates.append(adapters["law"])
        return {"law": f"law@{len(seen.updates)}"}

    stand_in = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(vllm, "update_adapters", update_adapters)
    monkeypatch.setattr(mt, "share_experts", lambda model, llm: seen.shared.append(model))
    return seen


def test_its_cases(engine, tmp_path):
    out = tmp_path / "rl.json"
    assert rl_loop.main([*WORDS.split(), "--out", str(out)]) == 0
    cases = results.read(out)[1]
    gaps = {c["pair"]: c["mean"] for c in cases if c["topic"] == "rl_gap"}
    assert list(gaps) == ["usual", "shared", "shared, replayed"]
    assert gaps["shared, replayed"] < 0.05 and len(engine.shared) == 1
    updates = {c["what"]: c for c in cases if c["topic"] == "rl_update"}
    assert list(updates) == ["idle", "under load"]
    assert all(0 < c["low"] <= c["ms"] <= c["high"] for c in updates.values())
    config, tensors = engine.updates[-1]
    assert config["target_parameters"] and len(tensors) == 4  # of a layer
    first = engine.updates[0][1]
    assert any(not torch.equal(first[name], tensors[name]) for name in tensors)


def test_updates_need_no_checkpoint(engine, tmp_path):
    words = [*WORDS.replace("bf16", "updates").split(), "--out", str(tmp_path / "rl.json")]
    assert rl_loop.main(words) == 0
    idle, busy = results.read(tmp_path / "rl.json")[1]
    assert (idle["what"], busy["what"], busy["mib"]) == ("idle", "under load", idle["mib"])
    config, tensors = engine.updates[-1]
    per_expert = 64 + 2 * 32 + 32 + 64  # rows and columns of gate_up_proj and down_proj
    assert idle["mib"] * 2**20 == 4 * config["r"] * 4 * per_expert and len(tensors) == 4


def test_a_part_that_fails_leaves_what_came_before(engine, tmp_path, monkeypatch):
    out = tmp_path / "rl.json"

    def share(model, llm):
        raise ValueError("layers are in another layout")

    monkeypatch.setattr(mt, "share_experts", share)
    with pytest.raises(ValueError, match="another layout"):
        rl_loop.main([*WORDS.split(), "--out", str(out)])
    assert [case["topic"] for case in results.read(out)[1]] == ["rl_gap"]
