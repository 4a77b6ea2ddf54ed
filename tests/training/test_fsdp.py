"""Two processes with parts of a model's parameters train as one with all of them: FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
import moelora.integrations.transformers as moelora_hf  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TWO = pytest.param(
    {},
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ],
    id="cuda",
)


def train(environment, *words):
    """The lines of the first of two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples/train_fsdp.py"), *words]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout.splitlines()


@pytest.mark.parametrize("environment", [pytest.param(ON_CPUS, id="cpu"), TWO])
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param([], id="16 bits"),
        pytest.param(["--quantized"], id="mxfp4", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(tmp_path, environment, experts):
    lines = train(environment, "--check", "--steps", "2", "--out", str(tmp_path), *experts)
    assert any(line.startswith("gradients of") for line in lines), lines
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    if not experts:
        folder = ROOT / "examples/demo_model"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        pool = moelora_hf.load_adapters(model, {"trained": tmp_path / "adapter"})
        tokens = torch.tensor([list(b"def train(self):")])
        with torch.no_grad():
            base = model(tokens).logits
            assert not torch.equal(model(tokens, adapter_names=["trained"]).logits, base)
        assert pool.names() == ["trained"]
