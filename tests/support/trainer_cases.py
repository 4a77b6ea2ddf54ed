"""Trainers of transformers and TRL on PEFT models of the demo, in one process or in two.

    trainer_cases.py FOLDER CASE ...

is what both processes of test_peft_trainers.py run. A case is a key of `CASES`. FOLDER gets what
trainers save, and has the factors that one process ends with.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from ranks import same_on_all, work
from safetensors.torch import load_file

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from demo_data import MODEL_DIR, training_tokens  # noqa: E402
from quantized_folders import qwen3_moe  # noqa: E402

LENGTH = 48
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LORA["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 4e-3}
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 5}
FSDP2 = EXAMPLES / "fsdp2.yaml"
# Of each case: the trainer, experts' format or how transformers shards the model, and how many
# batches are computed at a time.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp": ("Trainer", {}, 2),
    "fsdp2": ("Trainer", {}, 2),
    "tp and ep": ("Trainer", {"tp_size": 2, "ep_size": 2}, 1),
    "ep of two batches": ("Trainer", {"fsdp_size": 2, "ep_size": 2}, 2),
    "sft ddp": ("SFTTrainer", {}, 2),
    "sft fsdp2": ("SFTTrainer", {}, 2),
    "sft fsdp2 of nf4": ("SFTTrainer", {"experts": "nf4"}, 2),
    "sft ep of two batches": ("SFTTrainer", {"fsdp_size": 2, "ep_size": 2}, 2),
    "grpo ddp": ("GRPOTrainer", {}, 2),
    "grpo fsdp2": ("GRPOTrainer", {}, 2),
}


def rows(count: int = 24) -> list[torch.Tensor]:
    text = training_tokens("charmap")
    return [text[LENGTH * n : LENGTH * (n + 1)] for n in range(count)]


def base_model(experts: str | None = None, folder: Path | None = None, **sizes: int) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32}
    if sizes:
        options["distributed_config"] = transformers.distributed.DistributedConfig(**sizes)
    if experts is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, **options)
    else:
        model = moelora_hf.load_quantized(folder, experts=experts)  # bfloat16
    model.config.use_cache = False
    model.config.router_aux_loss_coef = 0.0  # that of TRL is of the batch of one process
    return model


def write_base(folder: Path) -> None:
    """A model whose rows are whole blocks of NF4, which those of the demo are not."""
    config = qwen3_moe()
    config.vocab_size = 256
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def lora_config() -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", **LORA)


def adapted(ours: bool, start: Path | None = None, **base: Any) -> Any:
    """A model with the adapter in `start`; None: with a new one."""
    torch.manual_seed(0)
    if start is None:
        model = peft.get_peft_model(base_model(**base), lora_config())
    else:
        model = peft.PeftModel.from_pretrained(base_model(**base), start, is_trainable=True)
    if ours:
        moelora_peft.attach(model.train())
    return model.train()


def tokenizer() -> Any:
    """Bytes as tokens, as of the demo model."""
    import tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    words = {names[byte]: byte for byte in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = byte_level, tokenizers.decoders.ByteLevel()
    # the demo's text has no zero bytes
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=names[0], eos_token=names[0]
    )


def dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, text))) for text in completions]


def trainer(
    ours: bool,
    folder: Path,
    kind: str = "Trainer",
    base: dict[str, Any] | None = None,
    start: Path | None = None,
    **more: Any,
) -> Any:
    """A trainer of `kind`. Without `start` TRL makes the PEFT model, attached before `train`."""
    options = {"output_dir": str(folder)} | STEPS | QUIET | {"save_strategy": "no"} | more
    options.setdefault("gradient_checkpointing", "gradient_checkpointing_kwargs" in options)
    if kind == "Trainer":
        data = [{"input_ids": row, "labels": row} for row in rows()]
        return transformers.Trainer(
            adapted(ours, start, **base or {}),
            transformers.TrainingArguments(**options),
            train_dataset=data[4:],
            eval_dataset=data[:4],
        )
    import trl

    options["bf16"] = False
    torch.manual_seed(0)
    both: dict[str, Any] = {"processing_class": tokenizer()}
    if start is None:
        model = base_model(**base or {})
        both["peft_config"] = lora_config()
    else:
        model = adapted(ours, start, **base or {})
    if kind == "SFTTrainer":
        data = dataset([{"input_ids": row.tolist()} for row in rows()])
        arguments = trl.SFTConfig(max_length=LENGTH, **options)
        made = trl.SFTTrainer(model, arguments, train_dataset=data, **both)
    else:
        prompts = [{"prompt": bytes(row[:12].tolist()).decode("latin-1")} for row in rows(8)]
        arguments = trl.GRPOConfig(max_completion_length=8, num_generations=2, **options)
        made = trl.GRPOTrainer(model, reward, arguments, train_dataset=dataset(prompts), **both)
    if ours and start is None:
        moelora_peft.attach(made.model)
    return made


def factors(made: Any) -> dict[str, torch.Tensor]:
    """Of a trained model, whole, by the names of checkpoints."""
    every = {}
    for name, parameter in made.model.named_parameters():
        if parameter.requires_grad:
            value: Any = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            name = name.replace("_checkpoint_wrapped_module.", "").replace(".default.", ".")
            every[name] = value.clone()
    return every


# ---- two processes ----


def launched(case: str) -> None:
    """What `accelerate launch --config_file` sets; accelerate shards on CPUs as on GPUs."""
    import os

    import accelerate.state
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    accelerate.state.AcceleratorState._reset_state()
    kinds = {member.name: member for member in accelerate.utils.DistributedType}
    like_gpus = kinds | {"MULTI_MLU": kinds["MULTI_CPU"]}
    accelerate.state.DistributedType = SimpleNamespace(**like_gpus)
    accelerate.Accelerator.multi_device = property(lambda self: "ep" in case)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]
    if "fsdp2" in case:
        words = ["--config_file", str(FSDP2), "--num_processes", "2", "program.py"]
        parsed = launch.launch_command_parser().parse_args(words)
        arguments, *_ = launch._validate_launch_command(parsed)
        before = dict(os.environ)
        os.environ |= prepare_multi_gpu_env(arguments)
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
            os.environ[name] = before[name]


def run(folder: Path, case: str) -> None:
    kind, base, batches = CASES[case]
    sharded = "ep_size" in base
    base = base | ({"folder": folder / "base"} if "experts" in base else {})
    launched(case)
    options: dict[str, Any] = {"per_device_train_batch_size": 4 // batches}
    options |= {"save_strategy": "steps", "save_steps": 2, "save_only_model": sharded}
    out = folder / case
    options["start"] = folder / f"start {base.get('experts')}"
    made = trainer(True, out, kind, base, **options)
    made.train()
    trained = factors(made)
    for name, factor in trained.items():
        assert same_on_all(factor), f"{name} differs"
    made.save_model(str(out / "saved"))
    dist.barrier()
    saved = load_file(out / "saved" / "adapter_model.safetensors")
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], factor) for name, factor in trained.items())
    if kind != "GRPOTrainer":
        for name, factor in torch.load(folder / f"{kind} {base.get('experts')}").items():
            off = ((saved[name] - factor).norm() / factor.norm()).item()
            assert off < (1e-2 if "experts" in base else 1e-3), (name, off)  # of bfloat16
    if not sharded:
        again = trainer(True, out / "again", kind, base, **options)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        resumed = factors(again)
        assert all(torch.equal(resumed[name], factor) for name, factor in trained.items())


def main() -> None:
    transformers.logging.set_verbosity_error()
    work(partial(run, Path(sys.argv[1])), sys.argv[2:])


if __name__ == "__main__":
    main()
