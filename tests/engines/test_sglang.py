"""moelora behind SGLang's interfaces, whose names and signatures are recorded here."""

import inspect
import logging
import sys
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sglang_stand_in
import torch
from cases import Spec
from checks import assert_close_to_ref
from sglang_stand_in import (
    OWN,
    HookRegistry,
    LoRAInfo,
    MoeLoraBatch,
    StandardCombineInput,
    StandardDispatcher,
    dispatched,
    make_base_layer,
    make_batch,
    make_info,
    make_lora_backend,
    run_layer,
    runner_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

import moelora
import moelora.integrations.sglang as moelora_sglang
from benchmarks.tables import models
from moelora.integrations.sglang import interface
from moelora.integrations.sglang.quantized import KINDS
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

pytest_plugins = ["sglang_fixtures"]

# Parameters of what moelora is called by, from sglang/srt of SGLang, where the tables of
# `interface` have them not: the tests call the stand-ins by these.
SIGNATURES = {
    "lora.moe.runner.MoeLoraRunner.from_layer": (
        "base_layer workspace is_shared_outer physical_rank"
    ),
    "lora.layers.FusedMoEWithLoRA.__init__": (
        "self base_layer lora_backend experts_shared_outer_loras max_lora_rank"
    ),
}
BACKENDS = pytest.mark.parametrize("backend", ["triton_v2", "csgmv"])


def test_signatures():
    """Those of the stand-ins, and of moelora's runners, which come in the place of SGLang's."""

    def parameters(function):
        return " ".join(inspect.signature(function).parameters)

    (legacy,), (ours,) = (p.replaced.values() for p in (interface.LEGACY, interface.TRITON_V2))
    assert legacy["MoeRunner.run"] == parameters(moelora_sglang.LegacyRunner.run)
    assert ours["MoeLoraRunner.run"] == parameters(moelora_sglang.MoeLoraRunner.run)
    makers = moelora_sglang.MoeLoraRunner.from_layer, sglang_stand_in.FusedMoEWithLoRA.__init__
    assert [*map(parameters, makers)] == [*SIGNATURES.values()]


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


# ---- layers ----


def run(sglang, p, zeros, backend="triton_v2", **config):
    """What SGLang's layer would do with a problem; without zeros beyond them ranks are needed."""
    lora_ranks = None if zeros else p.lora_ranks
    sizes = p.w2_lora_a.size(2), p.spec.sharing == "outer"
    base_layer, options = make_base_layer(p, **config), {"lora_ranks": lora_ranks, "name": backend}
    layer = sglang.layer(base_layer, *sizes, **options)
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
    tokens = 1 if name == "one_token" else 29
    p = replace(SPECS[name], dtype=dtype, scalings=False, tokens=tokens).build()
    there = p.to(device)
    combined = run(sglang, there, zeros, backend)
    assert isinstance(combined, StandardCombineInput)
    naive = naive_fused_experts_lora(**there.kwargs())
    assert_close_to_ref(combined.hidden_states, fused_experts_lora_ref(**p.kwargs()), naive, dtype)


class Operators(TorchDispatchMode):
    """Records which operators run, without views and empty tensors, which launch nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.name() != "aten::empty.memory_format":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@BACKENDS
def test_a_layer_runs_one_operator(backend, sglang):
    """On SGLang's tensors as they are: a copy would be launched by each layer in each step."""
    p = Spec(tokens=1, scalings=False).build()
    dtypes = (p.topk_ids, p.topk_weights, p.token_lora_mapping, p.lora_ranks)
    assert [t.dtype for t in dtypes] == [torch.int32, torch.float32, torch.int32, torch.int32]
    layer = sglang.layer(make_base_layer(p), name=backend, lora_ranks=p.lora_ranks)
    batch = make_batch(p)
    with Operators() as ran:
        run_layer(layer, p, batch, p.lora_ranks)
    assert ran.names == ["moelora.fused_experts_lora.default"]


def test_routed_scaling_factor(sglang):
    """Once: here, unless the router has done it."""
    p = Spec(tokens=9, scalings=False).build()
    plain = run(sglang, p, False).hidden_states
    scaled = run(sglang, p, False, routed_scaling_factor=2.5).hidden_states
    torch.testing.assert_close(scaled, 2.5 * plain)
    base_layer = make_base_layer(p, routed_scaling_factor=2.5)
    base_layer.should_fuse_routed_scaling_factor_in_topk = True
    make = moelora_sglang.MoeLoraRunner.from_layer
    assert make(base_layer, is_shared_outer=False, physical_rank=16).routed_scaling_factor is None


FP8, OF_GLOBAL_IDS = torch.zeros(1, dtype=torch.float8_e4m3fn), StandardDispatcher()
OF_GLOBAL_IDS.skip_local_expert_mapping = True
REASONS = {
    "its weights are torch.float8_e4m3fn": {"w13_weight": FP8},
    "its dispatcher is DeepEPDispatcher": {"dispatcher": type("DeepEPDispatcher", (), {})()},
    "its expert ids are global": {"dispatcher": OF_GLOBAL_IDS},
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


@BACKENDS
@pytest.mark.parametrize("graph", [True, False])
def test_a_batch_without_adapters(graph, backend, sglang, monkeypatch):
    """Runs the experts alone, but for graphs that are replayed with adapters."""
    p = Spec(tokens=9, scalings=False).build()
    monkeypatch.setattr("sglang.srt.lora.utils.capturing_lora_graph", lambda: graph)
    said = {"use_cuda_graph": graph, "has_active_lora": False}
    layer = sglang.layer(make_base_layer(p), name=backend, **said)
    batch = make_batch(p)
    if backend != "triton_v2":
        batch = make_info(batch, p.lora_ranks, has_active_lora=False)
    out = run_layer(layer, p, batch).hidden_states
    runner = getattr(runner_of(layer), "layer", runner_of(layer))
    without = runner.experts(dispatched(p), None, None).hidden_states
    assert torch.equal(out, without) is not graph


def refuses(*args, **named):
    raise NotImplementedError("no kernel for it")


def refuse(patch, batch):
    patch.setattr("moelora.integrations.sglang.layer.fused_experts_lora", refuses)
    return batch


def of_four_experts(patch, info):
    factors = info.down_lora_a_weights.repeat(1, 2, 1, 1)
    return replace(info, down_lora_a_weights=factors)


def of_tokens(chosen):
    """Changes a batch to one that has these of its tokens' adapter slots."""
    return lambda patch, info: replace(info, token_lora_mapping=chosen(info.token_lora_mapping))


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("csgmv", of_tokens(lambda slots: None), "it has no adapter slots of tokens"),
        ("csgmv", of_tokens(lambda slots: slots[:3]), "those of other tokens"),
        ("csgmv", of_four_experts, "of experts on other GPUs"),
        ("csgmv", refuse, "no kernel for it; SGLang's own path runs"),
        ("triton_v2", refuse, "no kernel for it; SGLang's own path runs"),
    ],
)
def test_other_batches_run_sglangs_own_path(backend, change, reason, sglang, monkeypatch, warned):
    p = Spec(scalings=False).build()
    layer = sglang.layer(make_base_layer(p), name=backend, lora_ranks=p.lora_ranks)
    batch = make_batch(p) if backend == "triton_v2" else make_info(make_batch(p), p.lora_ranks)
    with monkeypatch.context() as patch:
        other = change(patch, batch)
        for _ in range(2):
            assert run_layer(layer, p, other) == OWN
    (line,) = warned.messages
    assert line.startswith("moelora: a batch is not supported: ") and reason in line
    assert run_layer(layer, p, batch) != OWN


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


def build(with_cuda, gpus):
    def change(patch):
        patch.setattr("moelora._C.WITH_CUDA", with_cuda)
        patch.setattr("torch.cuda.device_count", lambda: gpus)

    return change


HOOKS = "sglang.srt.plugins.hook_registry"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda patch, v=value: patch.setenv("MOELORA_SGLANG", v), f"MOELORA_SGLANG={value}")
            for value in ("0", "false", "OFF", "no")
        ),
        (build(0, 1), "this build of moelora has no CUDA kernels"),
        (build(1, 0), "there is no GPU; SGLang's own path runs"),
        (
            lambda patch: patch.setattr(moelora_sglang, "problem_here", lambda: 1 / 0),
            "could not register: ZeroDivisionError: division by zero; SGLang's own path runs",
        ),
        (lambda patch: patch.setitem(sys.modules, HOOKS, None), f"there is no {HOOKS}.HookRegist"),
    ],
)
def test_sglang_is_left_as_it_was(change, said, sglang, monkeypatch, caplog):
    change(monkeypatch)
    monkeypatch.setattr("moelora._C.has_cuda", lambda: pytest.fail("that initializes CUDA"))
    HookRegistry.hooks.clear()
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        moelora_sglang.register()
        if "MOELORA" not in said:
            moelora_sglang.register()
    (line,) = caplog.messages
    assert said in line
    assert not HookRegistry.hooks


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


@pytest.mark.parametrize("activation", models.TAKEN["SGLang"])
def test_formats_by_activation_are_those_of_the_table_of_models(sglang, activation):
    """docs/answers.md: formats differ in tensors alone, whatever a layer computes of them."""
    gpt_oss = {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    config = gpt_oss if activation == "swigluoai" else {}
    layer = make_base_layer(Spec(activation=activation).build(), **config)
    taken = () if moelora_sglang.reason_against(layer) else ("bf16", *(k.about for k in KINDS))
    assert taken == tuple(form.split()[0] for form in models.TAKEN["SGLang"][activation])


def test_a_sglang_without_the_new_runner(sglang, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.lora.moe.runner")
    HookRegistry.hooks.clear()
    moelora_sglang.register()
    assert [target for target, _, _ in HookRegistry.hooks] == [f"{interface.LAYER}.__init__"]


# ---- safe to have installed ----


def patched(place, value):
    return lambda patch, layer: patch.setattr(place, value)


def of_a_new_name(patch, layer):
    del layer.should_fuse_routed_scaling_factor_in_topk


SRT, HERE = "sglang.srt", "moelora.integrations.sglang"
NO_IMAGE = "kernels of this build do not run on the H900: no kernel image is available"
UNEXPECTED = "it is not as expected (AttributeError: "
STAYS = [  # backend, what is otherwise, why
    ("csgmv", patched(f"{HERE}.reason_against_device", lambda: NO_IMAGE), NO_IMAGE),
    ("csgmv", patched(f"{HERE}.reason_against_layer", lambda layer: layer.new), UNEXPECTED),
    ("csgmv", of_a_new_name, UNEXPECTED),
    ("triton_v2", of_a_new_name, UNEXPECTED),
    (
        "triton_v2",
        patched(
            f"{SRT}.layers.moe.token_dispatcher.standard.StandardCombineInput",
            namedtuple("More", "hidden_states scales"),
        ),
        "StandardCombineInput requires scales",
    ),
    (
        "triton_v2",
        patched(
            f"{SRT}.lora.backend.base_backend.BaseLoRABackend.get_batch_info", lambda self: None
        ),
        "BaseLoRABackend.get_batch_info does not take layout",
    ),
    (
        "triton_v2",
        patched(f"{SRT}.lora.moe.runner.MoeLoraRunner.run", lambda self, dispatched, more: None),
        "MoeLoraRunner.run has the parameters ['self', 'dispatched', 'more'], not",
    ),
    (
        "triton_v2",
        patched(f"{SRT}.lora.moe.runner.MoeLoraBatch", LoRAInfo),
        "MoeLoraBatch has no down_lora_a, down_l",
    ),
    (
        "csgmv",
        patched(f"{SRT}.lora.lora_moe_runners.LoRAInfo", MoeLoraBatch),
        "LoRAInfo has no down_lora_a_weigh",
    ),
]


@pytest.mark.parametrize(("backend", "change", "why"), STAYS)
def test_layers_that_no_runner_is_made_for(backend, change, why, sglang, monkeypatch, warned):
    """The server starts, with SGLang's own path, and no forward fails."""
    base_layer = make_base_layer(Spec().build())
    change(monkeypatch, base_layer)
    for _ in range(2):
        assert sglang.stays(sglang.layer(base_layer, name=backend))
    (line,) = warned.messages
    assert line.startswith("moelora: a MoE layer is not supported: ") and why in line
    assert line.endswith("; SGLang's own path runs")


def test_layers_that_sglang_refuses_itself(sglang, monkeypatch, caplog):
    """Its runner of adapters needs compute capability 9.0; what moelora refuses then raises."""
    p = Spec(scalings=False).build()
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        for _ in range(2):
            runner = moelora_sglang.from_layer(refuses, object, make_base_layer(p))
    line = "SGLang has no runner of its own for a MoE layer: NotImplementedError: no kernel for it"
    assert [line in message for message in caplog.messages].count(True) == 1
    got = runner.run(dispatched(p), make_batch(p)).hidden_states
    assert torch.equal(got, moelora.fused_experts_lora(**p.kwargs()))
    monkeypatch.setattr("moelora.integrations.sglang.layer.fused_experts_lora", refuses)
    with pytest.raises(NotImplementedError, match="no kernel for it"):
        runner.run(dispatched(p), make_batch(p))
