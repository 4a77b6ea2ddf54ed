"""moelora behind SGLang's interfaces, whose names and signatures are recorded here."""

import importlib
import importlib.util
import inspect
import logging
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sglang_stand_in
import tomllib
import torch
from cases import Spec
from checks import assert_close_to_ref
from quantized_cases import FP8_FORMATS, fitted, to_fp8
from sglang_stand_in import (
    OWN,
    HookRegistry,
    LoRAInfo,
    MoeLoraBatch,
    MoeRunner,
    StandardCombineInput,
    dispatched,
    make_base_layer,
    make_batch,
    make_info,
    make_lora_backend,
    run_layer,
    runner_of,
)
from stand_in import doctor_on

import moelora
import moelora.integrations.sglang as moelora_sglang
from moelora.integrations.sglang import interface
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

pytest_plugins = ["sglang_fixtures"]

# What moelora is called by and calls, from sglang/srt of SGLang: legacy from 0.5.13 on, the runner
# of `triton_v2` from 0.5.23 on.
LEGACY = {
    "layers.moe.moe_runner.runner.MoeRunner.run": (
        "(self, dispatch_output, quant_info, lora_info=None)"
    ),
    "layers.moe.token_dispatcher.standard.StandardCombineInput": "(hidden_states)",
    "plugins.hook_registry.HookRegistry.register": (
        "(target, hook, hook_type=<HookType.AFTER: 'after'>, *, source=None)"
    ),
}
SIGNATURES = LEGACY | {
    "lora.moe.runner.MoeLoraRunner.from_layer": (
        "(base_layer, *, workspace=None, is_shared_outer, physical_rank)"
    ),
    "lora.moe.runner.MoeLoraRunner.run": "(self, dispatch_output, batch)",
    "lora.layers.FusedMoEWithLoRA.__init__": (
        "(self, base_layer, lora_backend, *, experts_shared_outer_loras=False, max_lora_rank=None)"
    ),
}


def signature(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


SERVING = Path(__file__).parents[2] / "docs/serving.md"
BACKENDS = pytest.mark.parametrize("backend", ["triton_v2", "csgmv"])


def test_signatures(sglang):
    """Those of the stand-ins, by which the other tests call, and of moelora's runner."""
    ours = {
        "lora.moe.runner.MoeLoraRunner.from_layer": moelora_sglang.MoeLoraRunner.from_layer,
        "lora.moe.runner.MoeLoraRunner.run": moelora_sglang.MoeLoraRunner.run,
        "lora.layers.FusedMoEWithLoRA.__init__": sglang_stand_in.make_layer().__init__,
        "layers.moe.moe_runner.runner.MoeRunner.run": moelora_sglang.LegacyRunner.run,
        "layers.moe.token_dispatcher.standard.StandardCombineInput": StandardCombineInput,
        "plugins.hook_registry.HookRegistry.register": HookRegistry.register,
    }
    assert {name: signature(f) for name, f in ours.items()} == SIGNATURES


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang")
def test_signatures_of_sglang():
    for name, wanted in SIGNATURES.items():
        path = f"sglang.srt.{name}".split(".")
        first = next(n for n, part in enumerate(path) if part[0].isupper())
        found = importlib.import_module(".".join(path[:first]))
        for part in path[first:]:
            found = getattr(found, part)
        assert signature(found) == wanted, name


def test_legacy_layers_of_other_runners_are_left_alone(sglang, caplog):
    layer = sglang.layer(None, name="csgmv", runner="marlin")
    assert sglang.stays(layer) and not hasattr(layer, "_moe_lora_runner")
    assert "its runner is marlin" in caplog.text


def test_true_ranks_are_those_of_all_tokens(sglang):
    runner = moelora_sglang.MoeLoraRunner(make_base_layer(Spec().build()))
    assert runner.true_ranks() is None
    runner.lora_backend = make_lora_backend(lora_ranks="these")
    assert runner.true_ranks() == "these"
    runner.lora_backend.get_batch_info = lambda layout: None
    assert runner.true_ranks() is None
    del sys.modules["sglang.srt.runtime_context"]  # a release without layouts
    runner.lora_backend.batch_info = SimpleNamespace(lora_ranks="its")
    assert runner.true_ranks() == "its"


def test_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    target = project["project"]["entry-points"]["sglang.srt.plugins"]["moelora"]
    module, name = target.split(":")
    assert getattr(importlib.import_module(module), name) is moelora_sglang.register


# ---- layers ----


def run(sglang, p, zeros, backend="triton_v2", **config):
    """What SGLang's layer would do with a problem; without zeros beyond them ranks are needed."""
    lora_ranks = None if zeros else p.lora_ranks
    layer = sglang.layer(
        make_base_layer(p, **config),
        p.w2_lora_a.size(2),
        p.spec.sharing == "outer",
        lora_ranks=lora_ranks,
        name=backend,
    )
    return run_layer(layer, p, make_batch(p, zeros), lora_ranks)


SPECS = {
    "mixed_ranks": Spec(ranks=(1, 33, 16, 64), spare_rank=3),
    "shared_outer": Spec(sharing="outer", ranks=(3, 16)),
    "base_only": Spec(mix="none"),
    "one_token": Spec(mix="one", routing="random"),
    "relu2": Spec(activation="relu2", slices=1),
    "weight_on_input": Spec(top_k=1, weight_on_input=True),
    "experts_of_other_ranks": Spec(routing="out_of_range"),
}


@BACKENDS
@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "true_ranks"])
@pytest.mark.parametrize("name", SPECS)
def test_layer(name, zeros, backend, sglang, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(
        SPECS[name], dtype=dtype, scalings=False, tokens=1 if name == "one_token" else 29
    )
    p = spec.build()
    there = p.to(device)
    combined = run(sglang, there, zeros, backend)
    assert isinstance(combined, StandardCombineInput)
    naive = naive_fused_experts_lora(**there.kwargs())
    assert_close_to_ref(combined.hidden_states, fused_experts_lora_ref(**p.kwargs()), naive, dtype)


def in_fp8(base_layer, q):
    """A layer as SGLang's `Fp8MoEMethod` leaves it: e4m3, float32 scales of 128 x 128 blocks."""
    base_layer.params_dtype = q.dense.hidden_states.dtype
    base_layer.quant_method = SimpleNamespace(block_quant=True, weight_block_size=[128, 128])
    for name, numbers in q.numbers.items():
        setattr(base_layer, f"{name}_weight", torch.nn.Parameter(numbers.q, requires_grad=False))
        first = torch.searchsorted(numbers.of_rows, torch.arange(int(numbers.of_rows[-1]) + 1))
        scales = torch.nn.Parameter(numbers.scales[:, first].contiguous(), requires_grad=False)
        setattr(base_layer, f"{name}_weight_scale_inv", scales)
    return base_layer


@dataclass
class Fp8Problem:
    dense: object
    numbers: dict  # of w13 and w2

    @classmethod
    def of(cls, spec):
        p = fitted(spec, spec.dtype, 128).build()
        format = FP8_FORMATS["fp8_block_w8a8"]
        return cls(p, {name: to_fp8(getattr(p, name), format, False) for name in ("w13", "w2")})

    def quantized(self):
        gate_up = "concatenated" if self.dense.spec.activation != "relu2" else None
        w13, w2 = self.numbers["w13"], self.numbers["w2"]
        kind = self.dense.hidden_states.dtype
        return {"w13": w13.pack(kind, gate_up), "w2": w2.pack(kind)}


@pytest.mark.parametrize("name", ["mixed_ranks", "relu2", "base_only"])
def test_fp8_blocks_run_in_tiles_and_nothing_else_is_kept(name, sglang):
    spec = replace(SPECS[name], dtype=torch.bfloat16, scalings=False, tokens=9)
    q = Fp8Problem.of(spec)
    base_layer = in_fp8(make_base_layer(q.dense), q)
    layer = sglang.layer(base_layer, max_lora_rank=64)
    got = run_layer(layer, q.dense).hidden_states
    dense = {**q.dense.kwargs(), **q.quantized()}
    assert torch.equal(got, moelora.fused_experts_lora(**dense))
    assert base_layer.w13_weight.dtype == base_layer.w2_weight.dtype == torch.uint8
    base = layer._base_run_moe_core(dispatch_output=dispatched(q.dense)).hidden_states
    plain = {**q.dense.base().kwargs(), **q.quantized()}
    assert torch.equal(base, moelora.fused_experts_lora(**plain))


@pytest.fixture
def fp8():
    """A layer whose weights moelora packs."""
    q = Fp8Problem.of(Spec(dtype=torch.bfloat16, scalings=False))
    return in_fp8(make_base_layer(q.dense), q)


def test_packed_weights_under_a_release_that_reads_them_otherwise(sglang, monkeypatch, fp8):
    """Batches without adapters would take tiles for the loader's weights."""
    monkeypatch.setattr(moelora_sglang, "BASE_PATH", "_base_run_moe_core_of_another_release")
    with pytest.raises(RuntimeError, match="has no _base_run_moe_core_of.*MOELORA_SGLANG=0"):
        sglang.layer(fp8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: setattr(b.quant_method, "block_quant", False), "torch.float8_e4m3fn, of Simple"),
        (lambda b: setattr(b.quant_method, "use_mxfp8", True), "torch.float8_e4m3fn, of SimpleNa"),
        (lambda b: setattr(b, "params_dtype", torch.float32), "its activations are torch.float32"),
        (
            lambda b: b.w2_weight_scale_inv.data.fill_(float("nan")),
            "weight_scale_inv has a scale that is NaN",
        ),
        (
            lambda b: setattr(b, "w2_weight_scale_inv", b.w2_weight_scale_inv.int()),
            "its scales are torch.float32 and torch.int32",
        ),
    ],
)
def test_other_fp8_layers_run_sglangs_own_path_and_keep_their_weights(
    change, reason, sglang, warned, fp8
):
    change(fp8)
    assert runner_of(sglang.layer(fp8)).run(None, None) == OWN
    assert reason in warned.text
    assert fp8.w13_weight.dtype == fp8.w2_weight.dtype == torch.float8_e4m3fn


def test_fp8_under_a_legacy_backend_runs_sglangs_own_path(sglang, warned, fp8):
    sglang.layer(fp8, name="csgmv")
    assert "and its backend is not triton_v2" in warned.text


def test_routed_scaling_factor(sglang):
    """Once: here, unless the router has done it."""
    p = Spec(tokens=9, scalings=False).build()
    plain = run(sglang, p, False).hidden_states
    scaled = run(sglang, p, False, routed_scaling_factor=2.5).hidden_states
    torch.testing.assert_close(scaled, 2.5 * plain)
    base_layer = make_base_layer(p, routed_scaling_factor=2.5)
    base_layer.should_fuse_routed_scaling_factor_in_topk = True
    runner = moelora_sglang.MoeLoraRunner.from_layer(
        base_layer, is_shared_outer=False, physical_rank=16
    )
    assert runner.routed_scaling_factor is None


REASONS = {
    "its weights are torch.float8_e4m3fn": {
        "w13_weight": torch.zeros(1, dtype=torch.float8_e4m3fn)
    },
    "its dispatcher is DeepEPDispatcher": {"dispatcher": type("DeepEPDispatcher", (), {})()},
    "its expert ids are global": {
        "dispatcher": type("StandardDispatcher", (), {"skip_local_expert_mapping": True})()
    },
    "its experts have biases": {"with_bias": True},
    "its activation is 'gelu', gated": {"activation": "gelu"},
    "its activation is 'silu', not gated": {"is_gated": False},
    "its activation is 'relu2', gated": {"activation": "relu2"},
    "its activation is scaled or clamped": {"gemm1_clamp_limit": 7.0},
    "its experts' outputs are not summed": {"no_combine": True},
    "shared experts are fused into it": {"num_fused_shared_experts": 1},
    "its routing weights are for the input": {"apply_router_weight_on_input": True},
}


@pytest.mark.parametrize("reason", REASONS)
def test_other_layers_run_sglangs_own_path(reason, sglang, warned):
    base_layer = make_base_layer(Spec(scalings=False).build())
    for name, value in REASONS[reason].items():
        owner = base_layer if hasattr(base_layer, name) else base_layer.moe_runner_config
        setattr(owner, name, value)
    for _ in range(2):
        assert runner_of(sglang.layer(base_layer)).run(None, None) == OWN
    assert [reason in message for message in warned.messages] == [True]
    with pytest.raises(NotImplementedError, match=reason):
        moelora_sglang.MoeLoraRunner.from_layer(base_layer, is_shared_outer=False, physical_rank=16)


@pytest.mark.parametrize("graph", [True, False])
def test_a_legacy_batch_without_adapters(graph, sglang):
    """Runs the experts alone, but for graphs, which are replayed with adapters."""
    p = Spec(tokens=9, scalings=False).build()
    layer = sglang.layer(make_base_layer(p), name="triton", use_cuda_graph=graph)
    info = make_info(make_batch(p), p.lora_ranks, has_active_lora=False)
    out = run_layer(layer, p, info).hidden_states
    without = layer._lora_runner.layer.experts(dispatched(p), None, None).hidden_states
    assert torch.equal(out, without) is not graph


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("it has no adapter slots of tokens", lambda info: {"token_lora_mapping": None}),
        ("those of other tokens", lambda info: {"token_lora_mapping": info.token_lora_mapping[:3]}),
        (
            "of experts on other GPUs",
            lambda info: {"down_lora_a_weights": info.down_lora_a_weights.repeat(1, 2, 1, 1)},
        ),
    ],
)
def test_other_legacy_batches_run_sglangs_own_path(reason, change, sglang, warned):
    p = Spec(scalings=False).build()
    layer = sglang.layer(make_base_layer(p), name="triton")
    info = make_info(make_batch(p))
    other = replace(info, **change(info))
    for _ in range(2):
        assert run_layer(layer, p, other) == OWN
    assert [reason in message for message in warned.messages] == [True]
    assert run_layer(layer, p, info) != OWN


@BACKENDS
def test_the_log_says_that_it_is_on(backend, sglang, caplog):
    """Once, with the first layer: SGLang has no log yet when it loads plugins."""
    p = Spec(scalings=False).build()
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        moelora_sglang.register()
        assert caplog.messages == []
        for _ in range(2):
            sglang.layer(make_base_layer(p), name=backend)
    assert caplog.messages == [
        f"moelora: version {moelora.__version__} runs MoE layers with LoRA; "
        "MOELORA_SGLANG=0 leaves them"
    ]


@pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
def test_switched_off(value, sglang, monkeypatch):
    monkeypatch.setenv("MOELORA_SGLANG", value)
    HookRegistry.hooks.clear()
    moelora_sglang.register()
    assert not HookRegistry.hooks


@pytest.mark.parametrize(
    "with_cuda, gpus, why",
    [(0, 1, "this build of moelora has no CUDA kernels"), (1, 0, "there is no GPU")],
)
def test_without_kernels_or_a_gpu_it_is_left_alone(
    sglang, monkeypatch, caplog, with_cuda, gpus, why
):
    monkeypatch.setattr("moelora._C.WITH_CUDA", with_cuda)
    monkeypatch.setattr("moelora._C.has_cuda", lambda: pytest.fail("that initializes CUDA"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    HookRegistry.hooks.clear()
    for _ in range(2):
        moelora_sglang.register()
    assert not HookRegistry.hooks
    (line,) = caplog.messages
    assert why in line
    assert line.endswith("; SGLang's own path runs")


@pytest.mark.parametrize(
    "dtype, capability, why",
    [
        (torch.bfloat16, (7, 5), "compute capability of its GPU is below 8.0"),
        # There are kernels for it on CPUs alone; its first forward would fail.
        (torch.float32, (9, 0), "its weights are torch.float32"),
    ],
)
def test_layers_that_no_gpu_kernel_is_for(sglang, monkeypatch, dtype, capability, why):
    layer = make_base_layer(Spec().build())
    assert moelora_sglang.reason_against(layer) is None
    layer.w13_weight = SimpleNamespace(dtype=dtype, device=torch.device("cuda", 1))
    capabilities = {layer.w13_weight.device: capability}
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.get)
    assert why in moelora_sglang.reason_against(layer)


def test_a_sglang_without_the_new_runner(sglang, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.lora.moe.runner")
    HookRegistry.hooks.clear()
    moelora_sglang.register()
    assert [target for target, _, _ in HookRegistry.hooks] == [f"{interface.LAYER}.__init__"]


# ---- safe to have installed ----


def test_kernels_that_do_not_run_on_this_gpu(sglang, monkeypatch, warned):
    why = "kernels of this build do not run on the H900: no kernel image is available"
    monkeypatch.setattr(moelora_sglang, "reason_against_device", lambda: why)
    for _ in range(2):
        assert sglang.stays(sglang.layer(None, name="csgmv"))
    assert warned.messages == [
        f"moelora: a MoE layer is not supported: {why}; SGLang's own path runs"
    ]


def of_another_release(monkeypatch, base_layer):
    def asks(layer):
        return layer.something_of_another_release

    monkeypatch.setattr(moelora_sglang, "reason_against_layer", asks)


def of_a_renamed_attribute(monkeypatch, base_layer):
    del base_layer.should_fuse_routed_scaling_factor_in_topk


@pytest.mark.parametrize(
    ("backend", "change"),
    [
        ("csgmv", of_another_release),
        ("csgmv", of_a_renamed_attribute),
        ("triton_v2", of_a_renamed_attribute),
    ],
)
def test_a_layer_that_no_runner_can_be_made_for(backend, change, sglang, monkeypatch, warned):
    """The server starts, with SGLang's own path."""
    base_layer = make_base_layer(Spec().build())
    change(monkeypatch, base_layer)
    for _ in range(2):
        assert sglang.stays(sglang.layer(base_layer, name=backend))
    (line,) = warned.messages
    assert "it is not as expected (AttributeError: " in line and line.endswith("own path runs")


@BACKENDS
def test_a_batch_that_the_operator_refuses(backend, sglang, monkeypatch, warned):
    p = Spec(scalings=False).build()
    layer = sglang.layer(make_base_layer(p), name=backend)

    def refuses(*args, **named):
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr("moelora.integrations.sglang.layer.fused_experts_lora", refuses)
    for _ in range(2):
        assert run_layer(layer, p, lora_ranks=p.lora_ranks) == OWN
    assert warned.messages == [
        "moelora: a batch is not supported: no kernel for it; SGLang's own path runs"
    ]


def test_sglangs_own_runner_is_made_with_the_layer(sglang, fp8):
    """A refusal may come while a graph is captured. Weights in tiles it cannot read."""
    p, made = Spec(scalings=False).build(), []

    def runner(*args, **kwargs):
        made.append(args)
        return "runner"

    def make(layer):
        return moelora_sglang.from_layer(
            runner, object, layer, is_shared_outer=False, physical_rank=16
        )

    assert isinstance(make(make_base_layer(p)), moelora_sglang.MoeLoraRunner) and len(made) == 1
    assert isinstance(make(fp8), moelora_sglang.MoeLoraRunner) and len(made) == 1


def test_layers_that_sglang_refuses_itself(sglang, monkeypatch, caplog):
    """Its runner of adapters needs compute capability 9.0; what moelora refuses then raises."""
    p = Spec(scalings=False).build()

    def refuses(*args, **kwargs):
        raise NotImplementedError("SM90 and SM100 only")

    with caplog.at_level(logging.INFO, "sglang.moelora"):
        for _ in range(2):
            runner = moelora_sglang.from_layer(refuses, object, make_base_layer(p))
    line = "SGLang has no runner of its own for a MoE layer: NotImplementedError: SM90 and SM100"
    assert [line in message for message in caplog.messages].count(True) == 1
    got = runner.run(dispatched(p), make_batch(p)).hidden_states
    assert torch.equal(got, moelora.fused_experts_lora(**p.kwargs()))
    monkeypatch.setattr("moelora.integrations.sglang.layer.fused_experts_lora", refuses)
    with pytest.raises(NotImplementedError, match="SM90 and SM100 only"):
        runner.run(dispatched(p), make_batch(p))


@pytest.mark.parametrize(
    "backend, change, why",
    [
        (
            "triton_v2",
            lambda at: setattr(
                sys.modules["sglang.srt.layers.moe.token_dispatcher.standard"],
                "StandardCombineInput",
                NamedTuple("More", [("hidden_states", Any), ("scales", Any)]),
            ),
            "StandardCombineInput requires scales",
        ),
        (
            "triton_v2",
            lambda at: setattr(
                sys.modules["sglang.srt.lora.backend.base_backend"],
                "BaseLoRABackend",
                type("BaseLoRABackend", (), {"get_batch_info": lambda self: None}),
            ),
            "BaseLoRABackend.get_batch_info does not take layout",
        ),
        (
            "triton_v2",
            lambda at: setattr(at.MoeLoraRunner, "run", lambda self, dispatched, batch, more: 0),
            "MoeLoraRunner.run has the parameters ['self', 'dispatched', 'batch', 'more'], not",
        ),
        (
            "triton_v2",
            lambda at: setattr(sys.modules[interface.RUNNER], "MoeLoraBatch", LoRAInfo),
            "MoeLoraBatch has no down_lora_a, down_lora_b, gate_up_lora_a",
        ),
        (
            "csgmv",
            lambda at: setattr(
                sys.modules["sglang.srt.lora.lora_moe_runners"], "LoRAInfo", MoeLoraBatch
            ),
            "LoRAInfo has no down_lora_a_weights",
        ),
    ],
    ids=["combine", "batch_info", "run", "batch", "legacy"],
)
def test_a_release_that_would_call_otherwise(backend, change, why, sglang, warned):
    """Seen before the first forward, which would fail."""
    change(sglang)
    for _ in range(2):
        assert sglang.stays(sglang.layer(make_base_layer(Spec().build()), name=backend))
    (line,) = warned.messages
    assert why in line and line.endswith("; SGLang's own path runs")


# ---- moelora doctor ----


@pytest.fixture
def doctor(sglang, monkeypatch, capsys):
    """Runs `moelora doctor` on a machine with a GPU and SGLang; (exit status, lines)."""
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    entry = "moelora.integrations.sglang:register", "sglang.srt.plugins"
    return doctor_on(monkeypatch, capsys, *entry, torch_version="2.14.1", sglang="0.5.23")


def test_doctor_says_which_layers_run(doctor):
    status, lines = doctor()
    assert status == 0
    sample = SERVING.read_text().split("$ moelora doctor\n")[2].split("```", 1)[0].splitlines()
    assert [line.replace(f"moelora {moelora.__version__}", "moelora") for line in lines] == [
        re.sub(r"^moelora [\d.]+,", "moelora,", line) for line in sample
    ]


HOOKS = "sglang.srt.plugins.hook_registry"
ON = "plugin: on: SGLang loads the plugin in every process"


@pytest.mark.parametrize(
    ("environment", "absent", "said"),
    [
        ({}, [interface.RUNNER], ON),
        # Without spaces, as SGLang reads them; an empty one loads all plugins.
        ({"SGLANG_PLUGINS": ""}, [], ON),
        ({"SGLANG_PLUGINS": "moelora"}, [], ON),
        ({"SGLANG_PLUGINS": "other, moelora"}, [], ON),
        ({"SGLANG_PLUGINS": "other"}, [], "SGLANG_PLUGINS=other does not name moelora, so SGLang"),
        ({"SGLANG_PLUGINS": ","}, [], "SGLANG_PLUGINS=, does not name moelora, so SGLang does"),
        ({"MOELORA_SGLANG": "false"}, [], "MOELORA_SGLANG=false"),
        ({}, [HOOKS], f"there is no {HOOKS}."),
    ],
)
def test_doctor_says_whether_it_is_on(doctor, monkeypatch, environment, absent, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for module in absent:
        monkeypatch.setitem(sys.modules, module, None)
    status, lines = doctor()
    if said == ON:
        assert status == 0 and lines[2] == ON
        assert lines[-1].endswith(" MoeLoraRunner     not in this release") == bool(absent)
    else:
        assert status == 1 and lines[2].startswith(f"plugin: off: {said}")
        assert lines[3] == "SGLang's own path runs"


def test_doctor_of_a_release_whose_layers_are_all_other_ones(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, interface.RUNNER, None)
    monkeypatch.setattr(MoeRunner, "run", lambda self, dispatched: None)
    status, lines = doctor()
    assert status == 1
    assert lines[2] == "plugin: off: no class of this SGLang is one that moelora can run"
    assert " SGLang's own path: sglang.srt.layers.moe.moe_runner.runner.MoeRunner.run " in lines[3]


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda patch: patch.setattr(moelora_sglang, "problem_here", lambda: 1 / 0),
            "could not register: ZeroDivisionError: division by zero",
        ),
        (
            lambda patch: patch.setitem(sys.modules, HOOKS, None),
            f"there is no {HOOKS}.HookRegistry.register",
        ),
    ],
    ids=["fails", "no hooks"],
)
def test_whatever_fails_leaves_sglang_as_it_was(change, said, sglang, monkeypatch, caplog):
    change(monkeypatch)
    HookRegistry.hooks.clear()
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        for _ in range(2):
            moelora_sglang.register()
    assert caplog.messages == [f"moelora: {said}; SGLang's own path runs"]
    assert not HookRegistry.hooks
