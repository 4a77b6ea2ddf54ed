"""transformers' Trainer and TRL's trainers, unchanged, on attached PEFT models of the demo."""

import sys
from pathlib import Path

import pytest
import torch
from checkout import needs_checkout
from hf_models import TARGETS, peft, transformers

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from demo_data import MODEL_DIR, training_tokens  # noqa: E402

pytestmark = needs_checkout

LENGTH = 48
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": TARGETS}
STEPS = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 4e-3}
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 5}
OPTIONS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "autocast": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2},
}


def rows(count=24):
    text = training_tokens("charmap")
    return [text[LENGTH * n : LENGTH * (n + 1)] for n in range(count)]


def base_model():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    model.config.use_cache = False
    return model


def adapted(ours):
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
    model = peft.get_peft_model(base_model(), config).train()
    if ours:
        moelora_peft.attach(model)
    return model


def trainer(ours, folder, **options):
    options = STEPS | QUIET | {"save_strategy": "no"} | options
    options["gradient_checkpointing"] = "gradient_checkpointing_kwargs" in options
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    data = [{"input_ids": row, "labels": row} for row in rows()]
    return transformers.Trainer(
        adapted(ours), arguments, train_dataset=data[4:], eval_dataset=data[:4]
    )


def losses(trained):
    logs = trained.state.log_history
    return torch.tensor([v for e in logs for k, v in e.items() if k in ("loss", "eval_loss")])


@pytest.mark.parametrize("name", OPTIONS)
def test_trainer_learns_as_with_peft_alone(tmp_path, name):
    options, found = OPTIONS[name], []
    for ours in (True, False):
        each = trainer(ours, tmp_path, **options)
        each.train()
        found.append(losses(each))
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


def test_a_checkpoint_is_served(tmp_path):
    trained = trainer(True, tmp_path, save_strategy="steps", save_steps=4)
    trained.train()
    served = base_model().eval()
    moelora_hf.load_adapters(served, {"a": tmp_path / "checkpoint-4"})
    ids = torch.stack(rows(3))
    with torch.no_grad():
        found = served(ids, adapter_names=["a", "a", "a"]).logits
        torch.testing.assert_close(found, trained.model.eval()(ids).logits, rtol=2e-4, atol=2e-4)
        base = served(ids).logits
    assert not torch.allclose(found, base, rtol=0, atol=0.1)


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


def tokenizer():
    """Bytes as tokens, as of the demo model."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    words = {names[byte]: byte for byte in range(256)}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer, found.decoder = byte_level, tokenizers.decoders.ByteLevel()
    # the demo's text has no zero bytes
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token=names[0], eos_token=names[0]
    )


@pytest.fixture
def trl():
    return pytest.importorskip("trl")


def dataset(rows):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_trainer_learns_as_with_peft_alone(trl, tmp_path, checkpointing):
    """TRL makes the PEFT model; it is attached before `train`."""
    data, found = dataset([{"input_ids": row.tolist()} for row in rows()]), []
    for ours in (True, False):
        torch.manual_seed(0)
        options = STEPS | QUIET | {"gradient_checkpointing": checkpointing}
        each = trl.SFTTrainer(
            base_model(),
            trl.SFTConfig(output_dir=str(tmp_path), bf16=False, max_length=LENGTH, **options),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
        )
        if ours:
            moelora_peft.attach(each.model)
        each.train()
        found.append(losses(each))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_grpo_trainer_learns_as_with_peft_alone(trl, tmp_path):
    """It samples from the model that it trains."""
    found = []
    data = dataset([{"prompt": bytes(row[:12].tolist()).decode("latin-1")} for row in rows(8)])
    options = STEPS | QUIET | {"max_steps": 2, "bf16": False, "gradient_checkpointing": False}

    def reward(completions, **kwargs):
        return [float(sum(map(ord, text))) for text in completions]

    for ours in (True, False):
        torch.manual_seed(0)
        each = trl.GRPOTrainer(
            base_model(),
            reward,
            trl.GRPOConfig(
                output_dir=str(tmp_path), max_completion_length=8, num_generations=2, **options
            ),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
        )
        if ours:
            moelora_peft.attach(each.model)
        each.train()
        logs = [e for e in each.state.log_history if "reward" in e]
        found.append(torch.tensor([[e["reward"], e["grad_norm"]] for e in logs]))
    assert found[1].shape == (2, 2) and found[1][0, 1] > 0
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
