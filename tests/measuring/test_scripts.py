"""Every script of benchmarks/ runs once, small; those of engines are in test_engines."""

import importlib
import os
import shutil
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from conftest import needs_gpu

import moelora
from benchmarks import grouped_mm, layer, linear_delta, qlora_step, tables, training
from benchmarks import training_parallel as parallel
from benchmarks.compare import bits, machine_code, power, products, times
from benchmarks.compare.__main__ import COMMANDS
from benchmarks.processes import apart
from moelora import _C
from moelora.__main__ import main
from moelora.bench import baselines, machine, results, shapes
from moelora.bench.layer import Layer

RL = "--preset micro --layers 1 --sampler transformers --formats bf16 --group 4 --new 3 --steps 2"
TIMED = "--adapters 3 --budget-ms 0 --device cpu"
BUILDS = f"before={_C.__file__} scalar={_C.__file__},MOELORA_FORCE_VARIANT=gemm_f32_scalar"
PARALLEL = "--world 2 --batch 1 --length 16 --steps 1 --layers 1 --modes alone,fsdp2,ep,tp"
CHURN = "--preset micro --layers 2 --slots 2 --adapters 4 --ranks 2,4 --rows 3 --prompt 6 --new 3"
CHURN += " --requests 10 --rate 200 --update-layers 2 --update-rank 4 --updates 2 --device cpu"
WHOLE = "base loaded mixed attention experts peft base"
gpu = (pytest.mark.gpu, needs_gpu)
SCRIPTS = [  # module, words, fields of its cases, their values
    (
        "benchmarks.layer",
        f"--shape 4,2,72,40 --tokens 1,9 --ranks 4 --mm-size 64 --dtypes fp32 {TIMED}",
        "model tokens rank",
        [("4x2x72x40", 1, 4), ("4x2x72x40", 9, 4)],
    ),
    (
        "benchmarks.compare",
        f"times {BUILDS} --dtype fp32 --shape 4,2,72,40 --tokens 9 --ranks 0,8 --turns 2 {TIMED}",
        "tokens rank same_bits",
        [(9, rank, "avx2" not in _C.cpu_features()) for rank in (0, 8)],
    ),
    (
        "benchmarks.compare",
        f"times {BUILDS} --part down --variants scalar --dtype fp32 --shape 4,2,72,40 --tokens 9 "
        f"--ranks 8 {TIMED}",
        "tokens rank",
        [(9, 8)],
    ),
    pytest.param(
        "benchmarks.compare",
        f"times now={_C.__file__} --watts --models qwen3 --tokens 64 --ranks 16 --turns 1 "
        "--budget-ms 200",
        "model tokens rank",
        [("qwen3", 64, 16)],
        marks=gpu,
    ),
    pytest.param(
        "benchmarks.compare",
        f"times now={_C.__file__} theirs={_C.__file__},DEEPGEMM=1 --part w13 --tokens 64 --turns 1 "
        "--models qwen3@fp8_block",
        "tokens rank same_bits",
        [(64, 0, False)],
        marks=(*gpu, pytest.mark.skipif(not find_spec("deep_gemm"), reason="no DeepGEMM")),
    ),
    pytest.param(
        "benchmarks.whole_adapters",
        "--preset micro --layers 1 --rows 4 --prompt 4 --steps 1 --runs 1 --rank 2 --device cpu",
        "what mode rows",
        [(what, "eager", 4) for what in WHOLE.split()],
        marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    ),
    pytest.param(
        "benchmarks.linear_delta",
        "--tokens 3 --ranks 16 --budget-ms 0",
        "layer tokens rank used",
        [(layer, 3, 16, used) for layer in ("qkv_proj", "o_proj") for used in (16, 0)],
        marks=gpu,
    ),
    pytest.param(
        "benchmarks.training",
        "--shapes qwen3 --tokens 64 --ranks 8,8+4x2 --formats mxfp4 --grouped-mm",
        "shape tokens tenants format",
        [("qwen3", 64, 1, "mxfp4"), ("qwen3", 64, 2, "mxfp4")],
        marks=gpu,
    ),
    pytest.param(
        "benchmarks.qlora_step",
        "--layers 1 --batch 1 --length 64 --steps 1",
        "engine length format",
        [("moelora", 64, "mxfp4")],
        marks=gpu,
    ),
    pytest.param(
        "benchmarks.training_parallel",
        PARALLEL,
        "mode world format layers tokens error",
        [
            (mode, 1 if mode == "alone" else 2, format, 1, 16, None)
            for format, modes in {"bf16": "alone fsdp2 ep tp", "mxfp4": "alone fsdp2"}.items()
            for mode in modes.split()
        ],
        marks=pytest.mark.slow,
    ),
    (
        "benchmarks.rl_loop",
        RL,
        "topic pair shared step",
        [("rl_gap", "usual", None, None)]
        + [("rl_memory", None, shared, None) for shared in (False, True)]
        + [("rl_gap", pair, None, None) for pair in ("shared", "shared, replayed")]
        + [("rl_reward", None, None, step) for step in range(2)]
        + [("rl_phase", None, None, None)],
    ),
    (
        "benchmarks.service",
        "--preset micro --layers 1 --clients 1,3 --tokens 6 --rounds 1",
        "topic mode clients",
        [("service", mode, n) for n in (1, 3) for mode in ("mixed", "swapped", "peft")],
    ),
    (
        "benchmarks.churn",
        CHURN,
        "topic policy what layout",
        [("arrivals", policy, None, None) for policy in ("resident", "ahead", "blocking")]
        + [
            ("updates", None, w, way) for way in ("stacked", "peft") for w in ("idle", "under load")
        ],
    ),
]


@pytest.mark.parametrize(("module", "words", "fields", "values"), SCRIPTS)
def test_a_script_writes_its_cases(tmp_path, monkeypatch, module, words, fields, values):
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)
    known = baselines.BASELINES.copy()  # benchmarks.layer adds vLLM's kernels
    monkeypatch.setattr(baselines, "BASELINES", known)
    try:
        script = importlib.import_module(f"{module}.__main__")
    except ImportError:
        script = importlib.import_module(module)
    out = tmp_path / "benchmarks/results/h100-churn.json"
    assert script.main([*words.split(), "--out", str(out)]) in (None, 0)
    _, cases = results.read(out)
    assert [tuple(case.get(name) for name in fields.split()) for case in cases] == values
    if "service" in module:  # the same adapters train
        mixed, swapped, peft = cases[3:]
        assert mixed["last_loss"] == pytest.approx(swapped["last_loss"], rel=1e-6)
        assert mixed["first_loss"] == pytest.approx(peft["first_loss"], rel=1e-4)
        assert all(c["last_loss"] < c["first_loss"] for c in cases)
    if "rl_loop" in module:
        pytest.importorskip("matplotlib")
        assert main(["plot", "--picture", "rl", str(out), "-o", str(tmp_path / "rl.svg")]) == 0
    if "churn" in module:
        monkeypatch.setattr(tables.files, "ROOT", tmp_path)
        said = " ".join(f"{tables.section('arrivals')}\n{tables.section('updates')}".split())
        assert "| ahead | 2 | 4 |" in said and "| 4 | under load | peft | 2 |" in said


def test_a_build_has_its_own_bits_and_others_are_named(capsys):
    test = "tests/operators/test_gemm.py::test_input_per_token_is_input_per_row[cpu-float32]"
    differs = "avx2" in _C.cpu_features()
    assert bits.main([*BUILDS.split(), "--", test]) == differs
    said = capsys.readouterr().out
    assert differs or "scalar: 2 calls in 1 tests as before" in said
    if differs:
        assert f"scalar differs: {test}: call 0: fused_moe_lora_gemm, tensors 1" in said
        assert "scalar: 0 calls in 0 tests as before, 1 tests differ" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_comparison_says_how_it_is_called(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("benchmarks.compare.__main__").main([command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: benchmarks.compare {command} ")


def test_a_larger_error_than_that_of_bf16_is_no_success():
    row = {"model": "qwen3", "format": "int4", "tokens": 1, "rank": 16}
    wanted = ["qwen3 int4 M=1 rank 16: moelora's error is 1.51 times that in bf16"]
    assert layer.errors([row | {"max_err_ratio": ratio} for ratio in (1.0, 1.51)]) == wanted


ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([("gemm", 0, 4), ("nccl:all_gather", 3, 6)], (6, 0, 0, 0)),  # a memory copy of that name
        ([("gemm", 2, 5), (ALL_GATHER, 0, 3)], (3, 3, 2, 0)),
        ([(ALL_GATHER, 0, 9), ("a", 1, 2), ("b", 1, 3), ("c", 8, 10)], (4, 9, 6, 0)),
        ([("gemm", 0, 1), (ALL_GATHER, 3, 4), (ALL_GATHER, 3, 5), ("gemm", 9, 10)], (2, 2, 2, 6)),
    ],
)
def test_communication_that_no_kernel_covers(kernels, expected):
    assert parallel.shares(kernels) == dict(zip(parallel.TRACED, expected, strict=True))


def test_threads_of_processes_that_share_cores_do_not_spin(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    policies = []

    def run(case, args):
        policies.append(os.environ.get("OMP_WAIT_POLICY"))
        return {"error": "not run"}

    monkeypatch.setattr(parallel, "run", run)
    parallel.main(["--world", "2", "--modes", "ddp", "--formats", "bf16"])
    assert policies == ["PASSIVE"]


@pytest.mark.parametrize(
    ("work", "arguments", "seconds", "last"),
    [
        (str.split, ("a b",), 60.0, "b"),
        (int, ("x",), 60.0, {"error": "ValueError: invalid literal for int() with base 10: 'x'"}),
        (os._exit, (3,), 60.0, {"error": "a process ended before its work"}),
        (time.sleep, (60,), 0.4, {"error": "stopped after 0 s"}),
    ],
)
def test_a_process_apart_answers_or_says_why_not(work, arguments, seconds, last):
    *_, answer = apart(work, [arguments], seconds)
    assert answer == last


# ---- power ----


class StandIn:
    """What DeepGEMM documents of its grouped product, in float32: tiles of 128 rows of one expert,
    -1 beyond its rows, scales for 128 columns of a row and for 128 x 128 weights."""

    @staticmethod
    def get_mk_alignment_for_contiguous_layout():
        return 128

    @staticmethod
    def get_mn_major_tma_aligned_tensor(scales):
        return scales.T.contiguous().T

    @staticmethod
    def m_grouped_fp8_gemm_nt_contiguous(left, right, out, groups):
        def numbers(values, scales, rows):
            blocks = scales.repeat_interleave(rows, -2).repeat_interleave(128, -1)
            return values.float() * blocks

        x, w = numbers(*left, 1), numbers(*right, 128)
        assert len(groups) % 128 == 0
        for tile, experts in enumerate(groups.split(128)):
            (expert,) = {*experts.tolist()} - {-1}
            assert experts[0] == expert
            rows = slice(128 * tile, 128 * tile + 128)
            out[rows] = (x[rows] @ w[expert].T).to(out.dtype)


@pytest.mark.parametrize("name", times.PRODUCTS)
def test_products_beside_deepgemm_are_the_same_products(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "deep_gemm", StandIn())
    monkeypatch.setenv("DEEPGEMM", "1")
    worker = times.Worker("cpu", watts=False)
    model = shapes.Model("small", 4, 2, 256, 128, format="fp8_block")
    worker.layer = Layer(model, "bf16", [], 1, worker.generator)
    worker.draw(170, [0], "many", "uniform", name)
    assert worker.turn(0, 0.0)["us"] > 0 and worker.batches[0].x.any()
    monkeypatch.setattr(products, "LARGEST", 2 * products.LARGEST)  # other numbers
    with pytest.raises(RuntimeError, match="is off by"):
        worker.draw(170, [0], "many", "uniform", name)
    monkeypatch.setenv("ZEROS", "1")
    worker.draw(170, [0], "many", "uniform", name)
    assert not worker.batches[0].x.any()


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("1365, 699.4, 0x0000000000000004", {"mhz": 1365, "watts": 699.4, "limits": ["power cap"]}),
        ("1980, 120.0, 0x0000000000000000", {"mhz": 1980, "watts": 120.0, "limits": []}),
        ("1980, [N/A], 0x0000000000000000", {}),
    ],
)
def test_what_nvidia_smi_says_of_power(line, known):
    sampler = power.Sampler.__new__(power.Sampler)
    sampler.samples = [(1.0, found)] if (found := power.sample(line)) else []
    assert sampler.since(1.0) == known and sampler.since(1.5) == {}


def test_turns_of_a_build_become_a_row():
    turns = [{"mhz": 1400, "limits": ["power cap"]}, {"mhz": 1380, "limits": []}, {"mhz": 1500}]
    assert times.merge(turns) == {"mhz": 1400, "limits": ["power cap"]}


def test_watts_are_refused_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        times.main(["now=.", "--watts", "--device", "cpu"])
    assert "error: clocks and watts are a GPU's" in capsys.readouterr().err


# ---- machine code ----

# What it prints of a file is what the file holds.
CUOBJDUMP = '#!/bin/sh\nfor last; do :; done\ncat "$last"\n'
SUM = "_ZN41_GLOBAL__N__{}_9_expand_cu_eaa517223sumILi4EEEvNS_6ParamsE"
KERNELS = {  # before and after; of the last by its next name: a new template parameter
    "_Z6offsetv": ("ULDC UR4, c[0x0][0x210]", "ULDC UR4, c[0x0][0x218]"),
    "_Z5otherv": ("@!P0 FADD R1, R2, R3|FADD R1, R2, R3|EXIT", "@!P0 FMUL R1, R2, R3|EXIT"),
    "_Z9registersv": ("FADD R1, R2, R3", "FADD R1, R2, R12"),
    SUM.format("5e91f383"): ("EXIT", None),
    SUM.format("00000000"): (None, "EXIT"),
    "_Z6shrinkILi4EEvv": ("EXIT", None),
    "_Z6resultILi4EEvv": (None, "NOP|EXIT"),
    "_Z6expandILi4EEvv": ("BRA 0x10", None),
    "_Z6expandILi4ELi1EEvv": (None, "BRA 0x10"),
}
SAID = """\
sm_90a other: 3 -> 2 instructions, 2 not in both: FADD -2, FMUL +1
sm_90a result<4>: only after, 2 instructions
sm_90a shrink<4>: only before, 1 instructions
sm_90a registers: 1 -> 1 instructions, 0 not in both
differ: 2, the same: 2, only offsets: 1, only before: 1, only after: 1
"""


@pytest.mark.skipif(not shutil.which("c++filt"), reason="c++filt is binutils'")
def test_machine_code_is_compared_kernel_by_kernel(tmp_path, capsys):
    tool = tmp_path / "cuobjdump"
    tool.write_text(CUOBJDUMP)
    tool.chmod(0o755)
    for side, name in enumerate(("before", "after")):
        text = "\tcode for sm_90a\n\t.target\tsm_90a\n"
        for kernel, code in ((k, both[side]) for k, both in KERNELS.items() if both[side]):
            text += f'\t\tFunction : {kernel}\n\t.headerflags @"EF_CUDA_SM90"\n'
            for i, line in enumerate(code.split("|")):
                text += f"        /*{16 * i:04x}*/    {line} ;      /* 0x00000a00ff01 */\n"
                text += f"{'':84}/* 0x000ff00000000800 */\n"
        (tmp_path / name).write_text(text)
    before, after, which = f"x={tmp_path}/before", f"y={tmp_path}/after", ["--cuobjdump", str(tool)]
    assert machine_code.main([before, after, *which]) == 1
    assert capsys.readouterr().out == SAID
    assert machine_code.main([before, before, *which]) == 0
    assert machine_code.main([before, after, *which, "--only", "offset"]) == 0


# ---- training ----

SMALL = qlora_step.Sizes("small", (), 2, 4, 2, 64, 64, 64, 4, 2, 16, 2, rank=4)


def test_a_qlora_step_repeats_layers_without_another_loss():
    sizes, words = replace(SMALL, format="nf4"), ["--steps", "1"]
    rows = []
    for more in ([], ["--checkpointing"]):
        args = qlora_step.parsed([*words, *more])
        rows.append(qlora_step.measure(sizes, qlora_step.Ours, 24, args, device="cpu"))
    assert rows[0]["loss"] == rows[1]["loss"] and all(row["tokens_per_s"] > 0 for row in rows)


def test_the_yardstick_of_training_has_the_same_gradients():
    """benchmarks.grouped_mm dequantizes; moelora does not."""
    model = shapes.Model("small", 4, 2, 64, 64, format="nf4")
    arguments, dout = training.draw(model, 24, [8], "cpu")
    arguments = training.quantize(arguments, model)
    found = []
    for fused in (moelora.fused_experts_lora, grouped_mm.fused_experts_lora):
        step = training.Step(dict(arguments), dout, fused)
        out = step.forward()
        step.run()
        found.append([out, *(leaf.grad for leaf in step.leaves)])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = ours.detach().float(), theirs.detach().float()
        assert (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()


def test_a_linear_layer_adds_what_a_loop_adds():
    case = linear_delta.batch("qkv_proj", 6, 16, 5, 2, "cpu")
    ids, ranks = torch.zeros((1, 1), dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)

    def loop(b):
        for x, y, slot in zip(b.x, b.y, b.mapping.tolist(), strict=True):
            stacks = zip(b.a, b.b, strict=True)
            y += torch.cat([expand[slot, 0] @ (shrink[slot, 0] @ x) for shrink, expand in stacks])
        return b.y

    def ours(b):
        return linear_delta.ours(b, ids.expand(6, 1), ranks)

    assert 0 < linear_delta.difference([case], ours, loop) < 0.05
