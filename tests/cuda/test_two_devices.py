"""A C caller's device_index, on a machine with two GPUs. Without any: make emulate."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from c_programs import ROOT, run
from conftest import needs_gpu


@pytest.mark.gpu
@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_calls_run_where_they_say(tmp_path):
    """The library's objects are those of the extension: no kernel is compiled for this."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc", path=f"{home}/bin")
    nvcc = nvcc or shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc")
    program = tmp_path / "two_devices"
    build = [sys.executable, "setup.py", "-q", "build_core", "--cuda"]
    link = [nvcc, "-O2", "-Icsrc", "-Itests/c", "tests/cuda/two_devices.c", "-o", program]
    link += ["build/core-cuda/libmoelora.a", "-lstdc++", "-lm", "-lpthread"]
    for command in (build, link):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "two_devices: 23 runs compared\n"
