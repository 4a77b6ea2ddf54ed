"""Two processes with parts of a model's parameters train as one with all of them: FSDP2."""

from pathlib import Path

import pytest
import torch
from ranks import ON_CPUS, run_ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import torch.distributed.fsdp  # noqa: E402

import moelora.integrations.peft as moelora_peft  # noqa: E402
import moelora.integrations.transformers as moelora_hf  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODULES = "torch.distributed.fsdp moelora.integrations.peft transformers.models.qwen3_moe"
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TWO = pytest.param({}, marks=[pytest.mark.gpu, needs_two], id="cuda")


@pytest.mark.parametrize("environment", [pytest.param(ON_CPUS, id="cpu"), TWO])
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param([], id="16 bits"),
        pytest.param(["--quantized"], id="mxfp4", marks=pytest.mark.slow),
        pytest.param(["--slots", "2"], id="slots"),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path, environment, experts):
    program, words = str(ROOT / "examples/train_fsdp.py"), ["--check", "--steps", "2", *experts]
    lines = run_ranks(program, *words, "--out", str(tmp_path), modules=MODULES, **environment)
    assert any(line.startswith("gradients of") for line in lines), lines
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    if "--quantized" not in experts:
        name = "adapter1" if experts else "adapter"
        folder = ROOT / "examples/demo_model"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        pool = moelora_hf.load_adapters(model, {"trained": tmp_path / name})
        tokens = torch.tensor([list(b"def train(self):")])
        with torch.no_grad():
            base = model(tokens).logits
            assert not torch.equal(model(tokens, adapter_names=["trained"]).logits, base)
        assert pool.names() == ["trained"]


def test_slots_where_only_rank_0_has_read_the_model():
    """As trainers of RL load it; the others get weights, ranks and scalings from rank 0."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"} | ON_CPUS
    program = str(ROOT / "tests/support/sharded_slots.py")
    lines = run_ranks(program, modules=MODULES, **environment)
    rows = [line.split() for line in lines if line.startswith("rank")]
    far = {(rank, dtype): float(distance) for _, rank, dtype, distance in rows}
    assert far.keys() == {(rank, f"torch.{t}") for rank in "01" for t in ("float32", "bfloat16")}
    assert all(value < (1e-5 if "32" in dtype else 1e-2) for (_, dtype), value in far.items())


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_version_1_is_refused(tmp_path, use_orig_params, training):
    """It joins the parameters of adapters and experts to one: the message names version 2."""
    folder = ROOT / "examples/demo_model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=experts))
    moelora_peft.attach(model.train(training))
    model.requires_grad_(model.training or not use_orig_params)
    tokens = torch.tensor([list(b"def train(self):")])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = torch.distributed.fsdp.FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        why = "FSDP of version 1 .*; take FSDP2: .*fully_shard"
        with torch.set_grad_enabled(training), pytest.raises(RuntimeError, match=why):
            sharded(input_ids=tokens)
    finally:
        torch.distributed.destroy_process_group()
