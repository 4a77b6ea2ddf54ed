"""Every script of benchmarks/ runs once, small; those of engines are in test_engines."""

import importlib
import os
import shutil
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from conftest import on_gpu

import moelora
from benchmarks import grouped_mm, layer, linear_delta, qlora_step, training
from benchmarks.compare.__main__ import COMMANDS
from benchmarks.processes import apart
from moelora import _C
from moelora.bench import baselines, machine, results, shapes

TOY = "--shape 4,2,72,40 --adapters 3 --budget-ms 0 --device cpu"
BUILDS = f"before={_C.__file__} scalar={_C.__file__},MOELORA_FORCE_VARIANT=gemm_f32_scalar"
TIMES = f"compare times {BUILDS} {TOY} --dtype fp32 --tokens 9"
DIFFERS = "avx2" in _C.cpu_features()
WHOLE = "--preset micro --layers 1 --rows 4 --prompt 4 --steps 1 --runs 1 --rank 2 --device cpu"
PARALLEL = "--world 2 --batch 1 --length 16 --steps 1 --layers 1 --modes alone,fsdp2,ep,tp"
SERVICE = "--preset micro --layers 1 --clients 1,3 --tokens 6 --rounds 1"
SCRIPTS = [  # a script and its words, fields of its cases, their values
    (f"layer {TOY} --tokens 1,9 --ranks 4 --mm-size 64 --dtypes fp32", "tokens rank", "1 4|9 4"),
    (f"{TIMES} --ranks 0,8 --turns 2", "rank same_bits", f"0 {not DIFFERS}|8 {not DIFFERS}"),
    (f"{TIMES} --part down --variants scalar", "tokens rank", "9 16|9 64"),
    on_gpu(f"compare times now={_C.__file__} --models qwen3 --tokens 64", "rank", "0|16|64"),
    on_gpu("linear_delta --tokens 3 --ranks 16 --budget-ms 0", "used", "16|0|16|0"),
    on_gpu("qlora_step --layers 1 --batch 1 --length 64 --steps 1", "engine", "moelora"),
    on_gpu(
        "training --shapes qwen3 --tokens 64 --ranks 8,8+4x2 --formats mxfp4 --grouped-mm",
        "tokens tenants format",
        "64 1 mxfp4|64 2 mxfp4",
    ),
    pytest.param(
        f"whole_adapters {WHOLE}",
        "what",
        "base|loaded|mixed|attention|experts|peft|base",
        marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    ),
    pytest.param(
        f"training_parallel {PARALLEL}",
        "mode format error",
        "alone bf16|fsdp2 bf16|ep bf16|tp bf16|alone mxfp4|fsdp2 mxfp4",
        marks=pytest.mark.slow,
    ),
    (f"service {SERVICE}", "mode clients", "mixed 1|swapped 1|peft 1|mixed 3|swapped 3|peft 3"),
]


def run(words):
    """The exit status of a script."""
    name, *words = words.split()
    script = importlib.import_module(f"benchmarks.{name}")
    if hasattr(script, "__path__"):
        script = importlib.import_module(f"benchmarks.{name}.__main__")
    return script.main(words)


@pytest.mark.parametrize(("words", "fields", "values"), SCRIPTS)
def test_a_script_writes_its_cases(tmp_path, monkeypatch, words, fields, values):
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)
    known = baselines.BASELINES.copy()  # benchmarks.layer adds vLLM's kernels
    monkeypatch.setattr(baselines, "BASELINES", known)
    out = tmp_path / "out.json"
    assert run(f"{words} --out {out}") in (None, 0)
    _, cases = results.read(out)
    found = [" ".join(str(case[f]) for f in fields.split() if f in case) for case in cases]
    assert found == values.split("|")
    if "service" in words:  # the same adapters train
        mixed, swapped, peft = cases[3:]
        assert mixed["last_loss"] == pytest.approx(swapped["last_loss"], rel=1e-6)
        assert mixed["first_loss"] == pytest.approx(peft["first_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare times before=nowhere --device cpu", "'before=nowhere' is not NAME=MODULE"),
        ("compare machine-code a=x b=y --cuobjdump nowhere", "it comes with CUDA's Toolkit"),
        ("compare times now=.", "--device is cuda, and torch finds no GPU"),
        ("compare times now=. --turns 0", "--turns is 0, wanted 1 or more"),
        ("qlora_step --engines unsloth", "unsloth needs --peers"),
        *((f"compare {name} --help", f"usage: benchmarks.compare {name} ") for name in COMMANDS),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(monkeypatch, capsys, words, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        run(words)
    assert message in "".join(capsys.readouterr()) + str(stopped.value)


KERNELS = {  # before and after; of the last by its next name: a new template parameter
    "_Z6offsetv": ("ULDC UR4, c[0x0][0x210]", "ULDC UR4, c[0x0][0x218]"),
    "_Z5otherv": ("@!P0 FADD R1, R2, R3|FADD R1, R2, R3|EXIT", "@!P0 FMUL R1, R2, R3|EXIT"),
    "_Z6shrinkILi4EEvv": ("EXIT", None),
    "_Z6expandILi4EEvv": ("BRA 0x10", None),
    "_Z6expandILi4ELi1EEvv": (None, "BRA 0x10"),
}
SAID = """\
sm_90a other: 3 -> 2 instructions, 2 not in both: FADD -2, FMUL +1
sm_90a shrink<4>: only before, 1 instructions
only offsets: 1, differ: 1, only before: 1, the same: 1
"""


@pytest.mark.skipif(not shutil.which("c++filt"), reason="c++filt is binutils'")
def test_machine_code_is_compared_kernel_by_kernel(tmp_path, capsys):
    words = f"compare machine-code --cuobjdump {tmp_path}/cuobjdump"
    for side, name in enumerate("xy"):
        text = "\tcode for sm_90a\n"
        for kernel, code in ((k, both[side]) for k, both in KERNELS.items() if both[side]):
            lines = (f"        /*0000*/    {line} ;\n" for line in code.split("|"))
            text += f"\t\tFunction : {kernel}\n" + "".join(lines)
        (tmp_path / name).write_text(text)
        words += f" {name}={tmp_path / name}"
    (tmp_path / "cuobjdump").write_text('#!/bin/sh\nfor last; do :; done\ncat "$last"\n')
    (tmp_path / "cuobjdump").chmod(0o755)
    assert run(words) == 1
    assert capsys.readouterr().out == SAID
    assert run(f"{words} --only offset") == 0


@pytest.mark.parametrize(
    ("work", "arguments", "seconds", "last"),
    [
        (str.split, ("a b",), 60.0, "b"),
        (int, ("x",), 60.0, {"error": "ValueError: invalid literal for int() with base 10: 'x'"}),
        (sys.exit, ("no GPU",), 60.0, {"error": "SystemExit: no GPU"}),
        (os._exit, (3,), 60.0, {"error": "a process ended before its work"}),
        (time.sleep, (60,), 0.4, {"error": "stopped after 0 s"}),
    ],
)
def test_a_process_apart_answers_or_says_why_not(work, arguments, seconds, last):
    *_, answer = apart(work, [arguments], seconds)
    assert answer == last


def test_a_larger_error_than_that_of_bf16_is_no_success():
    row = {"model": "qwen3", "format": "int4", "tokens": 1, "rank": 16}
    wanted = ["qwen3 int4 M=1 rank 16: moelora's error is 1.51 times that in bf16"]
    assert layer.errors([row | {"max_err_ratio": ratio} for ratio in (1.0, 1.51)]) == wanted


# ---- of scripts for GPUs, what runs without one ----


SMALL = qlora_step.Sizes("small", (), 2, 4, 2, 64, 64, 64, 4, 2, 16, 2, rank=4)


def test_a_qlora_step_repeats_layers_without_another_loss():
    rows = []
    for more in ([], ["--checkpointing"]):
        args = qlora_step.parsed(["--steps", "1", *more])
        rows.append(qlora_step.measure(SMALL, qlora_step.Ours, 24, args, device="cpu"))
    assert rows[0]["loss"] == rows[1]["loss"] and all(row["tokens_per_s"] > 0 for row in rows)


def test_the_yardstick_of_training_has_the_same_gradients():
    """benchmarks.grouped_mm dequantizes; moelora does not."""
    model = shapes.Model("small", 4, 2, 64, 64, format="nf4")
    arguments, dout = training.draw(model, 24, [8], "cpu")
    arguments = training.quantize(arguments, model)
    found = []
    for fused in (moelora.fused_experts_lora, grouped_mm.fused_experts_lora):
        step = training.Step(dict(arguments), dout, fused)
        step.run()
        found.append([leaf.grad for leaf in step.leaves])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()


def test_a_linear_layer_gets_its_delta():
    case = linear_delta.batch("qkv_proj", 6, 16, 5, 2, "cpu")
    ids, ranks = torch.zeros((6, 1), dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)
    before = case.y.clone()
    assert (linear_delta.ours(case, ids, ranks) != before).any(1).all()
