"""vLLM's own tests of `fused_moe_lora`, on moelora's operator of that name, on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_sources import RELEASES

SUPPORT = Path(__file__).parents[1] / "support"
FILE = "tests/lora/test_fused_moe_lora_kernel.py"
OTHERWISE = ("rejects_bad_block_size_m",)  # moelora takes blocks of any size
WITH_TESTS = [path for path in RELEASES if (path / FILE).exists()]


@pytest.mark.slow
@pytest.mark.skipif(not WITH_TESTS, reason="no source distribution of vLLM with its tests")
@pytest.mark.parametrize("release", WITH_TESTS, ids=lambda path: path.name)
def test_they_pass(tmp_path, release):
    file = tmp_path / Path(FILE).name
    file.write_text((release / FILE).read_text())
    words = ["-p", "vllm_own_tests", "--noconftest", "-q", "--tb=line", "--rootdir", str(tmp_path)]
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(file)],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    failed = re.findall(r"^FAILED \S+::(\w+)", run.stdout, re.M)
    assert [name for name in failed if not any(part in name for part in OTHERWISE)] == [], (
        run.stdout
    )
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 10, run.stdout + run.stderr
