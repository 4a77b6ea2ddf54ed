"""Models that processes share, by tensors and by experts, compute what one process does."""

import runpy
import sys
from pathlib import Path

import hf_models
import pytest
import small_models
import torch
import torch.distributed.checkpoint as dcp
import whole_models
from hf_models import tokens, transformers
from ranks import ON_CPUS, run_cases, run_ranks

pytest.importorskip("transformers.distributed.expert_parallel")
peft = pytest.importorskip("peft")

import parallel_cases  # noqa: E402

import moelora.integrations.peft as moelora_peft  # noqa: E402
import moelora.integrations.transformers as moelora_hf  # noqa: E402
from moelora.adapters.layers import MoELayer, Pair  # noqa: E402
from moelora.adapters.shards import Shard  # noqa: E402
from moelora.integrations.peft import parallel  # noqa: E402

MODULES = "moelora.integrations.peft transformers.models.{0}.modeling_{0} pytest"
ROOT = Path(__file__).resolve().parents[2]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_TWO_GPUS = [pytest.mark.gpu, TWO_GPUS]
PAIRS = {"a": {"seed": 1}, "b": {"seed": 2, "r": 8}, "c": {"seed": 3, "r": 8}}


def write(config, folder):
    """A model, its adapters, and what one process computes with them."""
    model = whole_models.make_whole_model(config)
    model.save_pretrained(folder / "model")
    for name, options in PAIRS.items():
        whole_models.write_adapter(model, folder / name, chosen=lambda name: True, **options)
    ids = tokens(len(parallel_cases.ROWS))
    options = {"max_loras": 3, "max_rank": 8, "targets": "all"}
    pool = moelora_hf.load_adapters(model, [folder / "a", folder / "b"], **options)
    with torch.no_grad():
        rows = parallel_cases.ROWS
        expected = {"ids": ids, "base": model(ids).logits}
        expected["mixed"] = model(ids, adapter_names=rows).logits
        pool.update("b", folder / "c")
        expected["updated"] = model(ids, adapter_names=rows).logits
        options = {"max_new_tokens": 3, "do_sample": False}
        expected["generated"] = model.generate(ids, adapter_names=rows, **options)
    torch.save(expected, folder / "expected")
    torch.save(pool.memory_bytes(), folder / "bytes")


def write_trained(config, folder):
    """An adapter, and what PEFT makes of it in one process."""
    model = hf_models.make_model(config)
    model.save_pretrained(folder / "model")
    hf_models.save_adapter(model, folder / "start", 1, target_modules=["q_proj", "o_proj"])
    model = peft.PeftModel.from_pretrained(model, folder / "start", is_trainable=True).train()
    ids = tokens(8)  # two of each of four processes
    optimizer = adamw(model)
    gradients = parallel_cases.step_on(model, optimizer, ids)
    torch.save({"ids": ids, "gradients": gradients}, folder / "trained")
    dcp.save(parallel_cases.state_of(model, optimizer), checkpoint_id=folder / "state of one")
    parallel_cases.step_on(model, optimizer, ids)
    model.save_pretrained(folder / "one")
    parallel_cases.step_on(model, optimizer, ids)
    return model


def adamw(model):
    factors = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(factors, lr=1e-2, foreach=False)


def eight():
    """Experts for each of four processes."""
    return small_models.config("qwen3_moe", num_experts=8)


@pytest.mark.parametrize(
    ("processes", "config", "modes"),
    [
        pytest.param(2, "qwen3_moe", [*parallel_cases.TRAINED, "ddp"], id="qwen3"),
        pytest.param(2, "gpt_oss", ["tp and ep"], id="gpt_oss", marks=pytest.mark.slow),
        pytest.param(4, eight, [*parallel_cases.FOUR, "ddp"], id="four processes"),
    ],
)
def test_processes_train_as_one(tmp_path, processes, config, modes):
    """They resume what one has saved by torch.distributed.checkpoint, and one what they have."""
    expected = dict(write_trained(config, tmp_path).named_parameters())
    run(tmp_path, processes, config, [f"train {mode}" for mode in modes])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True).train()
    optimizer = adamw(model)
    ids = torch.load(tmp_path / "trained")["ids"]
    for mode in modes:
        parallel_cases.resume(model, optimizer, tmp_path / f"state of all, {mode}")
        parallel_cases.step_on(model, optimizer, ids)
        for name, factor in model.named_parameters():
            parallel_cases.close(factor.detach(), expected[name].detach(), name, 1e-3)


@pytest.mark.parametrize(("dim", "halves"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_a_factor_join(dim, halves, size):
    """The last processes have less of what cannot be split equally, or nothing."""
    whole = torch.randn(2, 5, 10, 5)
    places = [parallel._Place(rank, size, dim, halves) for rank in range(size)]
    parts = [place.part(whole) for place in places]
    blocks = [block.chunk(size, dim) for block in whole.chunk(halves, dim)]
    for rank, part in enumerate(parts):
        each = [block[rank] for block in blocks if rank < len(block)]
        assert torch.equal(part, torch.cat(each, dim)) if each else part.numel() == 0
    rows = whole.size(dim)
    every = torch.stack([place.sent(part, rows) for place, part in zip(places, parts, strict=True)])
    assert all(torch.equal(place.joined(every, rows), whole) for place in places)


@pytest.mark.parametrize("axis", ["experts", "intermediate"])
def test_parts_of_frozen_factors_are_frozen(axis):
    """So that operators compute no gradients of them."""
    part = parallel.Part(Shard(axis, 0, 2), None, 1, 1.0)
    for frozen in parallel._SPLIT["experts"]:
        factors = {name: torch.ones(1, 4, 4, 4) for name in parallel._SPLIT["experts"]}
        for name, factor in factors.items():
            factor.requires_grad_(name != frozen)
        parts = part.take(factors)
        assert [name for name in factors if not parts[name].requires_grad] == [frozen]


def test_a_factor_of_all_experts_stays_whole():
    shared, each = torch.randn(1, 4, 16), torch.randn(4, 16, 4)
    pairs = {"down": Pair(shared, each, [2.0])}
    part = Shard("experts", 1, 2).experts(MoELayer("experts", 4, 16, 16), pairs)["down"]
    assert torch.equal(part.a, shared) and torch.equal(part.b, each[2:])


@pytest.mark.parametrize("call", ["load_adapters", "enable", "attach", "a step"])
def test_zero_3_is_refused(call):
    """Before anything changes; DeepSpeed marks the weights that it splits by `ds_id`."""
    model = hf_models.make_model("qwen3_moe")
    config = peft.LoraConfig(r=2, target_parameters=hf_models.TARGETS)
    adapted = peft.get_peft_model(model, config) if call in ("attach", "a step") else model
    if call == "a step":
        moelora_peft.attach(adapted.train())
    for number, parameter in enumerate(adapted.parameters()):
        parameter.ds_id = number
    calls = {
        "load_adapters": lambda: moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=2),
        "enable": lambda: moelora_hf.enable(model),
        "attach": lambda: moelora_peft.attach(adapted),
        "a step": lambda: adapted(tokens(2), labels=tokens(2)),
    }
    with pytest.raises(NotImplementedError, match="split by DeepSpeed's ZeRO-3.* ZeRO-1 or 2"):
        calls[call]()
    assert call == "a step" or not hasattr(model, "_moelora")


def run(folder, processes, config, cases):
    modules = MODULES.format(hf_models.config_of(config).model_type)
    options = {"cases": cases, "modules": modules, "processes": processes}
    run_cases(parallel_cases.__file__, str(folder), **options, **ON_CPUS)


@pytest.mark.parametrize(
    ("processes", "config", "cases"),
    [
        pytest.param(2, "qwen3_moe", [*parallel_cases.MODES, *parallel_cases.OTHERS], id="qwen3"),
        pytest.param(2, "deepseek_v3", ["tp"], id="deepseek_v3"),
        pytest.param(2, "gpt_oss", ["tp and ep"], id="gpt_oss", marks=pytest.mark.slow),
        pytest.param(4, eight, ["fsdp and tp", "ep of all"], id="four processes"),
    ],
)
def test_processes_serve_as_one(tmp_path, processes, config, cases):
    write(config, tmp_path)
    run(tmp_path, processes, config, cases)


@pytest.mark.timeout(600)  # starts processes twice
@pytest.mark.parametrize(
    ("mode", "environment", "most"),
    [
        pytest.param("ep", ON_CPUS, 1e-4, marks=pytest.mark.slow, id="cpu"),
        *(pytest.param(m, {}, 1e-2, marks=ON_TWO_GPUS, id=m) for m in ("ep", "tp", "tp+ep")),
    ],
)
def test_two_train_one_resumes_two_serve(tmp_path, monkeypatch, capsys, mode, environment, most):
    """By the example, which prints digests of the factors and what a text loses with them."""
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    program, modules = str(ROOT / "examples/parallel.py"), MODULES.format("qwen3_moe")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("set_verbosity_error", "disable_progress_bar"):  # of this process, too
        monkeypatch.setattr(transformers.utils.logging, name, lambda: None)
    if environment is ON_CPUS:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def of_two(*words):
        return run_ranks(program, *words, "--mode", mode, modules=modules, **environment)

    def of_one(*words):
        monkeypatch.setattr(sys, "argv", [program, *words])
        runpy.run_path(program, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    def digests(lines, verb):
        return [line.split()[-1] for line in lines if f" {verb} with " in line]

    def losses(lines):
        rows = (line.partition(": loss ") for line in lines if ": loss " in line)
        return {name: float(loss) for name, _, loss in rows}

    first = of_two("train", "--out", two)
    again = of_one("train", "--resume", two, "--out", one)
    (begun,), (ended,) = digests(again, "begins"), digests(again, "ends")
    assert digests(first, "ends") == [begun, begun] and ended != begun
    served = losses(of_two("serve", one))
    assert served == pytest.approx(losses(of_one("serve", one)), rel=most)
    assert served["trained"] < served["None"]
