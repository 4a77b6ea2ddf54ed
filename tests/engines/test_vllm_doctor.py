"""Safe to have installed: what vLLM runs where moelora cannot, and what `moelora doctor` says."""

import importlib
import importlib.metadata
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stand_in import doctor_on, installed, sample_in_docs
from vllm_layer import load, platform

import moelora
from moelora import integrations
from moelora.__main__ import main

pytest_plugins = ["vllm_fixtures"]

OWN = "vLLM's own path runs"


@pytest.fixture
def doctor(vllm, monkeypatch, capsys):
    """Runs the command on a machine that has a GPU, a wheel and vLLM; (exit status, lines)."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    vllm.set("vllm.platforms", "current_platform", platform())
    run = doctor_on(monkeypatch, capsys, "vllm.general_plugins", "2.14.0", vllm="0.33.0")
    run.report = load("moelora.integrations.vllm.report")
    return run


def test_the_sample_in_the_docs_is_what_it_prints(doctor, request):
    if "0.33.0" not in request.node.callspec.id:
        pytest.skip("the sample is of 0.33")
    status, lines = doctor()
    assert status == 0
    assert lines == sample_in_docs(1)


def test_every_format_has_a_line(doctor):
    _, lines = doctor()
    formats = load("moelora.integrations.vllm.formats").FORMATS.values()
    text = "\n".join(lines)
    assert all(format.about in text for format in formats)
    assert text.count("  moelora") >= len(formats) - 1
    assert text.count("not in this release") == 1, "one of two classes of compressed-tensors"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            ("VLLM_PLUGINS", v, f"VLLM_PLUGINS={v} does not name moelora, so vLLM does not load it")
            for v in ("other", "", "other, moelora")  # vLLM does not strip spaces
        ),
        *(("VLLM_PLUGINS", v, None) for v in ("moelora", "other,moelora")),
        ("MOELORA_VLLM", "0", "MOELORA_VLLM=0"),
        ("", "", "no installed package has moelora's entry point"),
    ],
)
def test_whether_it_is_on(doctor, monkeypatch, name, value, said):
    if name:
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    status, lines = doctor()
    assert status == (said is not None)
    if said:
        assert lines[-1] == OWN and lines[2].startswith(f"plugin: off: {said}")


def test_a_release_that_changed(doctor, vllm):
    """Of a method: that one alone. Of what all layers need: everything."""
    _, fp8 = vllm.method("fp8")
    vllm.monkeypatch.setattr(fp8, "__init__", lambda self, other: None)
    status, lines = doctor()
    (line,) = (line for line in lines if " Fp8MoEMethod " in line)
    assert status == 0 and "vLLM's own path: vllm." in line and "has the parameters" in line
    vllm.monkeypatch.setattr(vllm.TritonExperts, "apply", lambda self: None)
    status, lines = doctor()
    assert status == 1
    assert "TritonExperts.apply has the parameters ['self'], not" in lines[2]


@pytest.mark.parametrize("kind", [ImportError, SystemExit])
def test_an_engine_that_cannot_be_imported(doctor, monkeypatch, kind):
    why = "libcudart.so.13: cannot open shared object file"

    def fails():
        raise kind(why)

    broken = replace(doctor.report.REPORT, problem_here=fails)
    monkeypatch.setattr(doctor.report, "REPORT", broken)
    status, lines = doctor()
    assert (status, lines[-1]) == (1, f"plugin: off: {kind.__name__}: {why}")


def test_an_engine_without_metadata(doctor, monkeypatch, tmp_path):
    """A source tree on the path is an engine; a checkout in the current folder is not."""
    installed(monkeypatch)
    report = replace(doctor.report.REPORT, engine="anEngine")
    (tmp_path / "anengine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert report.version() is None
    (tmp_path / "anengine/__init__.py").write_text("raise ImportError\n")
    importlib.invalidate_caches()
    assert report.version() == "of an unknown version"


def test_without_an_engine(monkeypatch, capsys):
    installed(monkeypatch)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moelora doctor: neither vLLM nor SGLang is installed for this Python")
    assert f"{sys.executable} -m pip install vllm" in said


def test_both_engines(doctor, monkeypatch):
    """Each is reported; one that is off makes the exit status 1."""
    installed(monkeypatch, vllm="0.33.0", sglang="0.5.23")
    monkeypatch.setenv("MOELORA_SGLANG", "0")
    status, lines = doctor()
    assert lines[0].endswith("torch 2.14.0, vLLM 0.33.0, SGLang 0.5.23")
    assert "plugin: on: vLLM loads the plugin in every process" in lines
    assert lines[-2:] == ["plugin: off: MOELORA_SGLANG=0", "SGLang's own path runs"]
    assert status == 1


def test_kernels_of_this_machine():
    """Whatever it has, the command says so in one line."""
    from moelora.commands.doctor import kernels

    said, correct = kernels()
    assert "\n" not in said
    assert correct == (moelora._C.WITH_CUDA == 1 and torch.cuda.is_available())


# ---- in the engine ----


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'flash'", name="flash"), "No module named 'flash'"),
        (RuntimeError("no driver"), "RuntimeError: no driver"),
    ],
)
def test_a_format_that_cannot_be_imported(vllm, lines, error, why):
    """A package that it needs is missing: its layers stay with vLLM, and others are served."""
    place, _ = vllm.method("fp8")
    own = importlib.import_module

    def import_module(name, *args):
        if name == place:
            raise error
        return own(name, *args)

    vllm.monkeypatch.setattr(importlib, "import_module", import_module)
    vllm.register()
    wanted = f"moelora: {place} cannot be imported ({why}); {OWN} for layers of Fp8MoEMethod"
    assert wanted in lines
    assert vllm.chosen() is not vllm.TritonExperts


def test_a_kernel_of_another_release(vllm):
    """Layers whose kernel has another name stay as vLLM makes them, sharded or not."""
    given = []

    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        given.append(lora_config)

    vllm.monkeypatch.setattr(vllm.FusedMoEWithLoRA, "create_lora_weights", create_lora_weights)
    vllm.register()
    layer = vllm.FusedMoEWithLoRA.__new__(vllm.FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(activation=vllm.MoEActivation("silu"))
    for sharded in (True, False):
        config = SimpleNamespace(fully_sharded_loras=sharded)
        layer.create_lora_weights(4, config)
        assert given.pop() is config


def fake_gpu(monkeypatch, launch):
    """A machine with a GPU, on which a layer is what `launch` returns."""
    integrations._tried_out.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H900")
    tiny, calls = integrations._tiny_layer, []
    monkeypatch.setattr(integrations, "_tiny_layer", lambda device: tiny(torch.device("cpu")))
    operator = moelora.operators.experts.fused_experts_lora

    def fused_experts_lora(**given):
        calls.append(given)
        return operator(**given) if len(calls) % 2 else launch(operator(**given))

    monkeypatch.setattr(moelora.operators.experts, "fused_experts_lora", fused_experts_lora)
    return calls


@pytest.mark.parametrize(
    ("launch", "wanted"),
    [
        (lambda y: y, None),
        (lambda y: y + 1, "kernels of this build compute something else on the H900"),
        (lambda y: 1 / 0, "kernels of this build do not run on the H900: division by zero"),
    ],
    ids=["correct", "wrong", "fails"],
)
def test_a_first_launch_is_compared_with_the_cpu(monkeypatch, launch, wanted):
    calls = fake_gpu(monkeypatch, launch)
    for _ in range(2):
        said = integrations.reason_against_device()
        assert said == wanted or said.startswith(wanted)
    assert len(calls) == 2, "once in a process"
    integrations._tried_out.cache_clear()


def test_nothing_is_launched_before_cuda_is_initialized_or_in_a_capture(monkeypatch):
    calls = fake_gpu(monkeypatch, lambda y: y)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert integrations.reason_against_device() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert integrations.reason_against_device() is None
    assert calls == []


def test_the_tiny_layer_leaves_defaults_alone():
    """Engines set them; adapters, base rows and both experts are in it."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    try:
        given = integrations._tiny_layer(torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    with_adapters = moelora.fused_experts_lora(**given)
    without = moelora.fused_experts_lora(**given | {"adapter_enabled": torch.tensor([False])})
    assert with_adapters.isfinite().all() and with_adapters.abs().max() > 0.1
    assert [torch.equal(a, b) for a, b in zip(with_adapters, without, strict=True)] == [0, 1, 0]


@pytest.mark.gpu
def test_kernels_run_on_this_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.init()
    assert integrations.reason_against_device() is None
