"""transformers' Trainer and TRL's trainers, unchanged, on attached PEFT models of the demo."""

import pytest
import torch
from checkout import needs_checkout
from hf_models import peft
from ranks import ON_CPUS, run_cases

import moelora.integrations.transformers as moelora_hf

pytest.importorskip("accelerate")

import trainer_cases  # noqa: E402
from trainer_cases import adapted, base_model, factors, rows, trainer  # noqa: E402

pytestmark = needs_checkout

OPTIONS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "autocast": {"bf16": True},
    "sft": {"kind": "SFTTrainer"},
    "sft checkpointing": {"kind": "SFTTrainer", "gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2},
}


def losses(trained):
    logs = trained.state.log_history
    return torch.tensor([v for e in logs for k, v in e.items() if k in ("loss", "eval_loss")])


def trained(*arguments, **options):
    """Attached, then with PEFT alone."""
    for ours in (True, False):
        each = trainer(ours, *arguments, **options)
        each.train()
        yield each


SLOW = [pytest.param("compiled", marks=pytest.mark.slow)]  # in CI: test_peft_training.py


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "compiled"] + SLOW)
def test_trainer_learns_as_with_peft_alone(tmp_path, name):
    options = OPTIONS[name]
    if "kind" in options:
        pytest.importorskip("trl")
    found = map(losses, trained(tmp_path, **options))
    tolerance = 5e-3 if options.get("bf16") else 1e-4  # near-ties of routers in bfloat16
    torch.testing.assert_close(*found, rtol=0, atol=tolerance)


@pytest.mark.parametrize("detached", [False, True], ids=["attached", "alone"])
def test_resumed_from_a_checkpoint(tmp_path, detached):
    """A checkpoint has nothing of ours: both continue from it, ours with the bits of one run."""
    whole = trainer(True, tmp_path, save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer(not detached, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    if detached:
        torch.testing.assert_close(losses(again), losses(whole), rtol=0, atol=1e-4)
        return
    assert torch.equal(losses(again), losses(whole))
    parameters = zip(again.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in parameters)


def test_generate_between_steps(tmp_path):
    """The model that trains also samples, in either mode, from what it has learned so far."""
    model, ids = adapted(True), torch.stack(rows(2))[:, :16]
    model.config.use_cache = True
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    texts = set()
    for _ in range(3):
        model(torch.stack(rows(4)), labels=torch.stack(rows(4))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        texts_now = []
        for mode in (True, False):
            model.train(mode)
            texts_now.append(model.generate(ids, max_new_tokens=6, do_sample=False))
        model.train()
        model.save_pretrained(tmp_path)
        saved = peft.PeftModel.from_pretrained(base_model(), tmp_path).eval()
        texts_now.append(saved.generate(ids, max_new_tokens=6, do_sample=False))
        assert all(torch.equal(text, texts_now[0]) for text in texts_now)
        texts.add(str(texts_now[0].tolist()))
    assert len(texts) > 1


# ---- TRL ----


def test_grpo_trainer_learns_as_with_peft_alone(tmp_path):
    """It samples from the model that it trains."""
    pytest.importorskip("trl")
    found = []
    for each in trained(tmp_path, "GRPOTrainer", max_steps=2):
        logs = [e for e in each.state.log_history if "reward" in e]
        found.append(torch.tensor([[e["reward"], e["grad_norm"]] for e in logs]))
    assert found[1].shape == (2, 2) and found[1][0, 1] > 0
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


# ---- two processes ----


@pytest.mark.parametrize("library", ["transformers", "trl"])
def test_two_processes_train_as_one(tmp_path, library):
    """Factors are equal on both after each step's, saved once and whole, and a checkpoint resumes
    with the bits of one run. `accelerate launch` shards by examples/fsdp2.yaml.
    """
    pytest.importorskip("transformers.distributed.expert_parallel")
    pytest.importorskip(library)
    kinds = {"transformers": ["Trainer"], "trl": ["SFTTrainer", "GRPOTrainer"]}[library]
    cases = [case for case, (kind, *_) in trainer_cases.CASES.items() if kind in kinds]
    trainer_cases.write_base(tmp_path / "base")
    one = {}
    for experts in {trainer_cases.CASES[case][1].get("experts") for case in cases}:
        base = {"experts": experts, "folder": tmp_path / "base"}
        start = tmp_path / f"start {experts}"
        adapted(True, **base).save_pretrained(start)
        one[experts] = trainer(True, tmp_path, kinds[0], base, start, per_device_train_batch_size=4)
        one[experts].train()
        torch.save(factors(one[experts]), tmp_path / f"{kinds[0]} {experts}")
    modules = f"{library} moelora.integrations.peft transformers.models.qwen3_moe accelerate"
    run_cases(trainer_cases.__file__, str(tmp_path), cases=cases, modules=modules, **ON_CPUS)
    ids = torch.stack(rows(3))
    for case in cases:
        kind, base, _ = trainer_cases.CASES[case]
        experts = base.get("experts")
        served = base_model(experts, tmp_path / "base").eval()
        moelora_hf.load_adapters(served, {"a": tmp_path / case / "saved"})
        with torch.no_grad():
            logits = served(ids, adapter_names=["a", "a", "a"]).logits
            if kind == kinds[0]:
                off = logits - one[experts].model.eval()(ids).logits
                # Of the median token: in bfloat16 a router may flip between two equal experts.
                assert off.abs().amax(-1).median() < 2e-2
            assert not torch.allclose(logits, served(ids).logits, rtol=0, atol=0.02)
