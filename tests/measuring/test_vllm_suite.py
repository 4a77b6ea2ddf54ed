"""vLLM's tests with the plugin on and off, on a pretended vLLM with pretended tests."""

import pytest

pytest.importorskip("tomllib")

import e2e_vllm  # noqa: E402
from e2e import topics  # noqa: E402

from benchmarks import vllm_suite  # noqa: E402

SITE = """\
mkdir -p $SITE/vllm/lora/ops $SITE/vllm/plugins
touch $SITE/vllm/lora/ops/__init__.py
echo "fused_moe_lora = None" > $SITE/vllm/lora/ops/triton_ops.py
echo "def load_general_plugins(): pass" > $SITE/vllm/plugins/__init__.py
"""

TESTS = """\
import pytest
from vllm.lora.ops.triton_ops import fused_moe_lora

@pytest.mark.parametrize("n", range(20))
def test_moe_of_both(n, a_fixture):
    assert n < 20 and a_fixture == 3

def test_moe_kernel_is_that_of_moelora():
    assert fused_moe_lora.__module__ == "moelora.integrations.vllm.ops"

def test_moe_rejects_bad_block_size_m():
    assert fused_moe_lora is None

def test_moe_worse():
    assert fused_moe_lora is None

def test_that_fails_anyway():
    assert False
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    folder = e2e_vllm.pack(tmp_path, monkeypatch)
    with open(folder / "install_chunk.sh", "a") as script:
        script.write(SITE)
    return folder


@pytest.fixture
def tests(tmp_path):
    lora = tmp_path / "sdist/tests/lora"
    lora.mkdir(parents=True)
    for folder in (lora, lora.parent):
        (folder / "__init__.py").touch()
    (lora / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef a_fixture():\n    return 3\n"
    )
    (lora / "test_fused_moe_lora_kernel.py").write_text(TESTS)
    return lora.parent


def run(tmp_path, peers, *options):
    return e2e_vllm.run(vllm_suite, tmp_path, peers, *options)


@pytest.mark.slow
def test_a_test_that_fails_with_the_plugin_alone_is_found(tmp_path, peers, tests):
    code, written, log = run(tmp_path, peers, "--tests", tests, "--each", "4", "--cases")
    assert code == 1
    (row,) = topics(written, "tests")
    assert row["file"] == "lora.test_fused_moe_lora_kernel", log
    assert (row["passed_off"], row["failed_off"]) == (6, 2)
    assert (row["passed_on"], row["failed_on"]) == (5, 3)
    assert [name.rpartition("::")[2] for name in row["worse"]] == ["test_moe_worse"]
    assert [name.rpartition("_bad_")[2] for name in row["otherwise"]] == ["block_size_m"]
    assert {row["file"] for row in topics(written, "not run")} >= {"lora/test_mixtral.py"}


@pytest.mark.slow
def test_models_run_with_the_plugin_and_without(tmp_path, peers):
    words = ("--cases", "bf16", "olmoe", "--at-once", "4", "--reps", "1")
    code, written, log = run(tmp_path, peers, *words)
    assert code == 0, log
    speeds = {(r["model"], r["engine"], r["batch"]) for r in topics(written, "speed")}
    assert len(speeds) == 2 * 2 * 2
    said = [row["what"] for row in topics(written, "target")]
    assert [text.partition(":")[0] for text in said] == ["bf16", "bf16", "olmoe", "olmoe"]
    compared = {row["compared"] for row in topics(written, "answers")}
    assert {"moelora olmoe, vllm olmoe: mixed", "moelora bf16: mixed, each alone"} <= compared


def test_a_run_without_tests_is_not_good():
    assert [row["ok"] for row in vllm_suite.compare_outcomes({}, {})] == [False]
    passed = {"file::test": ("passed", 1.0)}
    (row,) = vllm_suite.compare_outcomes(passed, {})
    assert row["worse"] == ["file::test"] and not row["ok"]
    (row,) = vllm_suite.compare_outcomes({"file::test": ("failed", 1.0)}, passed)
    assert row["ok"]
