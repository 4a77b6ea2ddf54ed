"""moelora behind SGLang's interfaces, whose names and signatures are recorded here."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import sys
from dataclasses import dataclass, replace
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tomllib
import torch
from cases import Spec
from checks import assert_close_to_ref
from quantized_cases import FP8_FORMATS, fitted, to_fp8

import moelora
import moelora.integrations.sglang as moelora_sglang
from moelora.__main__ import main
from moelora.integrations.sglang import interface
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

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


# ---- as much of SGLang as moelora meets ----


SERVING = Path(__file__).parents[2] / "docs/serving.md"


class StandardDispatcher:
    skip_local_expert_mapping = False


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: Any


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class BaseLoRABackend:
    def get_batch_info(self, layout=None):
        pass


@dataclass(kw_only=True)
class MoeLoraBatch:
    gate_up_lora_a: torch.Tensor
    gate_up_lora_b: torch.Tensor
    down_lora_a: torch.Tensor
    down_lora_b: torch.Tensor
    token_lora_mapping: torch.Tensor
    use_cuda_graph: bool = False
    is_prefill: bool = False


@dataclass(kw_only=True)
class LoRAInfo:
    gate_up_lora_a_weights: torch.Tensor
    gate_up_lora_b_weights: torch.Tensor
    down_lora_a_weights: torch.Tensor
    down_lora_b_weights: torch.Tensor
    lora_ranks: torch.Tensor | None
    token_lora_mapping: torch.Tensor | None
    has_active_lora: bool = True


class MoeRunnerBackend(Enum):
    TRITON = "triton"
    MARLIN = "marlin"

    def is_triton(self):
        return self is MoeRunnerBackend.TRITON


class MoeRunner:
    def __init__(self, runner_backend):
        self.runner_backend = runner_backend

    def run(self, dispatch_output, quant_info, lora_info=None):
        return "SGLang's own"


class LoRABatchLayout(Enum):
    DP_LOCAL = "dp_local"
    TP_GLOBAL = "tp_global"


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: list[tuple[str, Any, HookType]] = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, hook_type in cls.hooks:
            module, owner, name = target.rsplit(".", 2)
            owner = getattr(importlib.import_module(module), owner)
            method = inspect.getattr_static(owner, name)
            bound = isinstance(method, classmethod)
            wrapped = cls.wrap(method.__func__ if bound else method, hook, hook_type)
            setattr(owner, name, classmethod(wrapped) if bound else wrapped)

    @staticmethod
    def wrap(original, hook, hook_type):
        def around(*args, **kwargs):
            return hook(original, *args, **kwargs)

        def after(*args, **kwargs):
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        return {HookType.AROUND: around, HookType.AFTER: after}[hook_type]


def make_runner():
    class MoeLoraRunner:
        @classmethod
        def from_layer(cls, base_layer, *, workspace=None, is_shared_outer, physical_rank):
            return cls()

        def run(self, dispatch_output, batch):
            return "SGLang's own"

    return MoeLoraRunner


def make_layer():
    class FusedMoEWithLoRA:
        def __init__(
            self, base_layer, lora_backend, *, experts_shared_outer_loras=False, max_lora_rank=None
        ):
            from sglang.srt.lora.moe.runner import MoeLoraRunner

            self.base_layer, self.lora_backend = base_layer, lora_backend
            if lora_backend.name != "triton_v2":
                self._lora_runner = MoeRunner(MoeRunnerBackend(lora_backend.runner))
                return
            self._moe_lora_runner = MoeLoraRunner.from_layer(
                base_layer,
                workspace=object(),
                is_shared_outer=experts_shared_outer_loras,
                physical_rank=max_lora_rank,
            )
            self._base_run_moe_core = "SGLang's own"

    return FusedMoEWithLoRA


@pytest.fixture
def hook_registry(monkeypatch):
    """What the module of this name has; tests against sources have SGLang's own."""
    monkeypatch.setattr(HookRegistry, "hooks", [])
    return {"HookRegistry": HookRegistry, "HookType": HookType}


@pytest.fixture
def sglang(monkeypatch, hook_registry):
    """Stand-ins for SGLang's modules, with the plugin registered and its hooks applied."""
    contents = {
        "sglang.srt.layers.moe.token_dispatcher.standard": {
            "StandardCombineInput": StandardCombineInput,
            "StandardDispatchOutput": StandardDispatchOutput,
        },
        "sglang.srt.layers.moe.topk": {"StandardTopKOutput": StandardTopKOutput},
        "sglang.srt.layers.moe.moe_runner.runner": {"MoeRunner": MoeRunner},
        "sglang.srt.lora.backend.base_backend": {"BaseLoRABackend": BaseLoRABackend},
        "sglang.srt.lora.lora_moe_runners": {"LoRAInfo": LoRAInfo},
        "sglang.srt.lora.layers": {"FusedMoEWithLoRA": make_layer()},
        "sglang.srt.lora.moe.runner": {
            "MoeLoraRunner": make_runner(),
            "MoeLoraBatch": MoeLoraBatch,
        },
        "sglang.srt.runtime_context": {"LoRABatchLayout": LoRABatchLayout},
        "sglang.srt.plugins.hook_registry": hook_registry,
    }
    for path in contents:
        parts = path.split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if name not in sys.modules:
                module = ModuleType(name)
                module.__spec__, module.__path__ = ModuleSpec(name, None), []
                monkeypatch.setitem(sys.modules, name, module)
        vars(sys.modules[path]).update(contents[path])
    moelora_sglang._say.cache_clear()
    moelora_sglang._tell.cache_clear()
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    moelora_sglang.register()
    hook_registry["HookRegistry"].apply_hooks()
    return SimpleNamespace(**{name: value for c in contents.values() for name, value in c.items()})


def test_signatures(sglang):
    """Those of the stand-ins, by which the other tests call, and of moelora's runner."""
    ours = {
        "lora.moe.runner.MoeLoraRunner.from_layer": moelora_sglang.MoeLoraRunner.from_layer,
        "lora.moe.runner.MoeLoraRunner.run": moelora_sglang.MoeLoraRunner.run,
        "lora.layers.FusedMoEWithLoRA.__init__": make_layer().__init__,
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
    layer = sglang.FusedMoEWithLoRA(None, make_lora_backend(name="csgmv", runner="marlin"))
    assert type(layer._lora_runner) is MoeRunner and not hasattr(layer, "_moe_lora_runner")
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


def make_batch(p, zeros=True) -> MoeLoraBatch:
    """The adapters of a problem as SGLang's memory pool has them: slices below each other."""

    def stack(factors):
        factors = torch.cat(factors, dim=2) if isinstance(factors, list) else factors
        return factors.nan_to_num(0.0) if zeros else factors

    return MoeLoraBatch(
        gate_up_lora_a=stack(p.w13_lora_a),
        gate_up_lora_b=stack(p.w13_lora_b),
        down_lora_a=stack(p.w2_lora_a),
        down_lora_b=stack(p.w2_lora_b),
        token_lora_mapping=p.token_lora_mapping,
    )


def make_base_layer(p, **config):
    defaults = {
        "activation": p.spec.activation,
        "is_gated": p.spec.activation != "relu2",
        "top_k": p.spec.top_k,
        "routed_scaling_factor": None,
        "apply_router_weight_on_input": p.spec.weight_on_input,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "no_combine": False,
        "num_fused_shared_experts": 0,
    }
    return SimpleNamespace(
        w13_weight=p.w13,
        w2_weight=p.w2,
        dispatcher=StandardDispatcher(),
        should_fuse_routed_scaling_factor_in_topk=False,
        with_bias=False,
        moe_runner_config=SimpleNamespace(**defaults | config),
    )


def make_lora_backend(lora_ranks=None, name="triton_v2", runner="triton", use_cuda_graph=False):
    """Of the tokens of all ranks it knows the slots' ranks, of those of this one other ones."""
    local = SimpleNamespace(lora_ranks="not these", use_cuda_graph=use_cuda_graph)
    infos = {
        LoRABatchLayout.TP_GLOBAL: SimpleNamespace(lora_ranks=lora_ranks),
        LoRABatchLayout.DP_LOCAL: local,
    }
    return SimpleNamespace(name=name, runner=runner, batch_info=local, get_batch_info=infos.get)


def make_info(batch, lora_ranks=None, **others) -> LoRAInfo:
    """The same adapters as legacy backends hand them over."""
    factors = {
        f"{name}_weights": getattr(batch, name)
        for name in ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")
    }
    mapping = {"token_lora_mapping": batch.token_lora_mapping}
    return LoRAInfo(**factors | mapping | others, lora_ranks=lora_ranks)


def dispatched(p):
    topk = SimpleNamespace(topk_weights=p.topk_weights, topk_ids=p.topk_ids, router_logits=None)
    return SimpleNamespace(hidden_states=p.hidden_states, topk_output=topk)


def run(sglang, p, zeros, name="triton_v2", **config):
    """What SGLang's layer would do with a problem; without zeros beyond them ranks are needed."""
    lora_ranks = None if zeros else p.lora_ranks
    layer = sglang.FusedMoEWithLoRA(
        make_base_layer(p, **config),
        make_lora_backend(lora_ranks, name),
        experts_shared_outer_loras=p.spec.sharing == "outer",
        max_lora_rank=p.w2_lora_a.size(2),
    )
    batch = make_batch(p, zeros)
    if name == "triton_v2":
        return layer._moe_lora_runner.run(dispatched(p), batch)
    return layer._lora_runner.run(dispatched(p), None, lora_info=make_info(batch, lora_ranks))


SPECS = {
    "mixed_ranks": Spec(ranks=(1, 33, 16, 64), spare_rank=3),
    "shared_outer": Spec(sharing="outer", ranks=(3, 16)),
    "base_only": Spec(mix="none"),
    "one_token": Spec(mix="one", routing="random"),
    "relu2": Spec(activation="relu2", slices=1),
    "weight_on_input": Spec(top_k=1, weight_on_input=True),
    "experts_of_other_ranks": Spec(routing="out_of_range"),
}


@pytest.mark.parametrize("backend", ["triton_v2", "csgmv"])
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
    layer = sglang.FusedMoEWithLoRA(base_layer, make_lora_backend(), max_lora_rank=64)
    got = layer._moe_lora_runner.run(dispatched(q.dense), make_batch(q.dense)).hidden_states
    dense = {**q.dense.kwargs(), **q.quantized()}
    assert torch.equal(got, moelora.fused_experts_lora(**dense))
    assert base_layer.w13_weight.dtype == base_layer.w2_weight.dtype == torch.uint8
    base = layer._base_run_moe_core(dispatch_output=dispatched(q.dense)).hidden_states
    plain = {**q.dense.base().kwargs(), **q.quantized()}
    assert torch.equal(base, moelora.fused_experts_lora(**plain))


def test_packed_weights_under_a_release_that_reads_them_otherwise(sglang, monkeypatch):
    """Batches without adapters would take tiles for the loader's weights."""
    q = Fp8Problem.of(Spec(dtype=torch.bfloat16, scalings=False))
    monkeypatch.setattr(moelora_sglang, "BASE_PATH", "_base_run_moe_core_of_another_release")
    with pytest.raises(RuntimeError, match="has no _base_run_moe_core_of.*MOELORA_SGLANG=0"):
        sglang.FusedMoEWithLoRA(in_fp8(make_base_layer(q.dense), q), make_lora_backend())


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
    change, reason, sglang, caplog
):
    q = Fp8Problem.of(Spec(dtype=torch.bfloat16, scalings=False))
    base_layer = in_fp8(make_base_layer(q.dense), q)
    change(base_layer)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        layer = sglang.FusedMoEWithLoRA(base_layer, make_lora_backend(), max_lora_rank=16)
    assert layer._moe_lora_runner.run(None, None) == "SGLang's own"
    assert reason in caplog.text
    assert base_layer.w13_weight.dtype == base_layer.w2_weight.dtype == torch.float8_e4m3fn


def test_fp8_under_a_legacy_backend_runs_sglangs_own_path(sglang, caplog):
    q = Fp8Problem.of(Spec(dtype=torch.bfloat16, scalings=False))
    base_layer = in_fp8(make_base_layer(q.dense), q)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        sglang.FusedMoEWithLoRA(base_layer, make_lora_backend(name="csgmv"), max_lora_rank=16)
    assert "and its backend is not triton_v2" in caplog.text


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
def test_other_layers_run_sglangs_own_path(reason, sglang, caplog):
    p = Spec(scalings=False).build()
    base_layer = make_base_layer(p)
    for name, value in REASONS[reason].items():
        owner = base_layer if hasattr(base_layer, name) else base_layer.moe_runner_config
        setattr(owner, name, value)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        for _ in range(2):
            layer = sglang.FusedMoEWithLoRA(base_layer, make_lora_backend(), max_lora_rank=16)
            assert layer._moe_lora_runner.run(None, None) == "SGLang's own"
    assert [reason in message for message in caplog.messages] == [True]
    with pytest.raises(NotImplementedError, match=reason):
        moelora_sglang.MoeLoraRunner.from_layer(base_layer, is_shared_outer=False, physical_rank=16)


@pytest.mark.parametrize("graph", [True, False])
def test_a_legacy_batch_without_adapters(graph, sglang):
    """Runs the experts alone, but for graphs, which are replayed with adapters."""
    p = Spec(tokens=9, scalings=False).build()
    backend = make_lora_backend(name="triton", use_cuda_graph=graph)
    runner = sglang.FusedMoEWithLoRA(make_base_layer(p), backend)._lora_runner
    info = make_info(make_batch(p), p.lora_ranks, has_active_lora=False)
    out = runner.run(dispatched(p), None, lora_info=info).hidden_states
    without = runner.layer.experts(dispatched(p), None, None).hidden_states
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
def test_other_legacy_batches_run_sglangs_own_path(reason, change, sglang, caplog):
    p = Spec(scalings=False).build()
    layer = sglang.FusedMoEWithLoRA(make_base_layer(p), make_lora_backend(name="triton"))
    info = make_info(make_batch(p))
    other = replace(info, **change(info))
    for _ in range(2):
        assert layer._lora_runner.run(dispatched(p), None, lora_info=other) == "SGLang's own"
    assert [reason in message for message in caplog.messages] == [True]
    assert layer._lora_runner.run(dispatched(p), None, lora_info=info) != "SGLang's own"


@pytest.mark.parametrize("name", ["triton_v2", "csgmv"])
def test_the_log_says_that_it_is_on(name, sglang, caplog):
    """Once, with the first layer: SGLang has no log yet when it loads plugins."""
    p = Spec(scalings=False).build()
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        moelora_sglang.register()
        assert caplog.messages == []
        for _ in range(2):
            sglang.FusedMoEWithLoRA(make_base_layer(p), make_lora_backend(name=name))
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


def test_a_layer_on_an_old_gpu_is_left_alone(sglang, monkeypatch):
    layer = make_base_layer(Spec().build())
    assert moelora_sglang.reason_against(layer) is None
    layer.w13_weight = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 1))
    monkeypatch.setattr("torch.cuda.get_device_capability", {layer.w13_weight.device: (7, 5)}.get)
    assert "compute capability of its GPU is below 8.0" in moelora_sglang.reason_against(layer)


def test_a_layer_in_float32_on_a_gpu_is_left_alone(sglang, monkeypatch):
    """There are kernels for it on CPUs alone; its first forward would fail."""
    layer = make_base_layer(Spec().build())
    layer.w13_weight = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 1))
    monkeypatch.setattr("torch.cuda.get_device_capability", {layer.w13_weight.device: (9, 0)}.get)
    assert "its weights are torch.float32" in moelora_sglang.reason_against(layer)


def test_a_sglang_without_the_new_runner(sglang, monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.lora.moe.runner")
    HookRegistry.hooks.clear()
    moelora_sglang.register()
    assert [target for target, _, _ in HookRegistry.hooks] == [f"{interface.LAYER}.__init__"]


# ---- safe to have installed ----


def test_kernels_that_do_not_run_on_this_gpu(sglang, monkeypatch, caplog):
    why = "kernels of this build do not run on the H900: no kernel image is available"
    monkeypatch.setattr(moelora_sglang, "reason_against_device", lambda: why)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        for _ in range(2):
            layer = sglang.FusedMoEWithLoRA(None, make_lora_backend(name="csgmv"))
    assert type(layer._lora_runner) is MoeRunner
    assert caplog.messages == [
        f"moelora: a MoE layer is not supported: {why}; SGLang's own path runs"
    ]


def test_a_release_whose_layers_are_other_ones(sglang, monkeypatch, caplog):
    def asks(layer):
        return layer.something_of_another_release

    monkeypatch.setattr(moelora_sglang, "reason_against_layer", asks)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        layer = sglang.FusedMoEWithLoRA(None, make_lora_backend(name="csgmv"))
    assert type(layer._lora_runner) is MoeRunner
    (line,) = caplog.messages
    assert "it is not as expected (AttributeError: " in line and line.endswith("own path runs")


@pytest.mark.parametrize("name", ["triton_v2", "csgmv"])
def test_a_layer_that_no_runner_can_be_made_for(name, sglang, caplog):
    """Of a release that renamed an attribute: the server starts, with SGLang's own path."""
    base_layer = make_base_layer(Spec().build())
    del base_layer.should_fuse_routed_scaling_factor_in_topk
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        for _ in range(2):
            layer = sglang.FusedMoEWithLoRA(
                base_layer, make_lora_backend(name=name), max_lora_rank=16
            )
    if name == "csgmv":
        assert type(layer._lora_runner) is MoeRunner
    else:
        assert type(layer._moe_lora_runner) is sglang.MoeLoraRunner
    (line,) = caplog.messages
    assert "it is not as expected (AttributeError: " in line and line.endswith("own path runs")


@pytest.mark.parametrize("name", ["triton_v2", "csgmv"])
def test_a_batch_that_the_operator_refuses(name, sglang, monkeypatch, caplog):
    p = Spec(scalings=False).build()
    backend = make_lora_backend(name=name)
    layer = sglang.FusedMoEWithLoRA(make_base_layer(p), backend, max_lora_rank=16)

    def refuses(*args, **named):
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr("moelora.integrations.sglang.layer.fused_experts_lora", refuses)
    batch = make_batch(p)
    for _ in range(2):
        if name == "csgmv":
            info = make_info(batch, p.lora_ranks)
            got = layer._lora_runner.run(dispatched(p), None, lora_info=info)
        else:
            got = layer._moe_lora_runner.run(dispatched(p), batch)
        assert got == "SGLang's own"
    assert caplog.messages == [
        "moelora: a batch is not supported: no kernel for it; SGLang's own path runs"
    ]


def test_sglangs_own_runner_is_made_with_the_layer(sglang):
    """A refusal may come while a graph is captured. Weights in tiles it cannot read."""
    p, made = Spec(scalings=False).build(), []
    own = moelora_sglang.MoeLoraRunner

    def make(original, cls, *args, **kwargs):
        def of_sglang(*args, **kwargs):
            made.append(args)
            return original(*args, **kwargs)

        return moelora_sglang.from_layer(of_sglang, cls, *args, **kwargs)

    sizes = {"is_shared_outer": False, "physical_rank": 16}
    plain = make(lambda *args, **kwargs: "runner", object, make_base_layer(p), **sizes)
    assert isinstance(plain, own) and len(made) == 1
    q = Fp8Problem.of(Spec(dtype=torch.bfloat16, scalings=False))
    packed = make(None, object, in_fp8(make_base_layer(q.dense), q), **sizes)
    assert isinstance(packed, own) and len(made) == 1


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
    "name, change, why",
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
def test_a_release_that_would_call_otherwise(name, change, why, sglang, monkeypatch, caplog):
    """Seen before the first forward, which would fail."""
    change(sglang)
    with caplog.at_level(logging.WARNING, "sglang.moelora"):
        for _ in range(2):
            layer = sglang.FusedMoEWithLoRA(
                make_base_layer(Spec().build()), make_lora_backend(name=name), max_lora_rank=16
            )
    if name == "csgmv":
        assert type(layer._lora_runner) is MoeRunner
    else:
        assert type(layer._moe_lora_runner) is sglang.MoeLoraRunner
    (line,) = caplog.messages
    assert why in line and line.endswith("; SGLang's own path runs")


@pytest.fixture
def doctor(sglang, monkeypatch, capsys):
    """Runs `moelora doctor` on a machine with a GPU and SGLang; (exit status, lines)."""
    versions, distribution = {"sglang": "0.5.23"}, importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or distribution("no " + name)
    )
    value, group = "moelora.integrations.sglang:register", "sglang.srt.plugins"
    entries = [importlib.metadata.EntryPoint("moelora", value, group)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(
        "moelora.commands.doctor.kernels", lambda: ("correct on NVIDIA H100 80GB HBM3", True)
    )
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)

    def run():
        status = main(["doctor"])
        return status, capsys.readouterr().out.splitlines()

    return run


def test_doctor_says_which_layers_run(doctor):
    status, lines = doctor()
    assert status == 0
    sample = SERVING.read_text().split("$ moelora doctor\n")[2].split("```", 1)[0].splitlines()
    assert [line.replace(f"moelora {moelora.__version__}", "moelora") for line in lines] == [
        re.sub(r"^moelora [\d.]+,", "moelora,", line) for line in sample
    ]


def test_doctor_of_a_release_without_the_new_runner(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, interface.RUNNER, None)
    status, lines = doctor()
    assert status == 0 and lines[-1].endswith(" MoeLoraRunner     not in this release")


@pytest.mark.parametrize("value", ["", "moelora", "other, moelora"])
def test_doctor_reads_sglang_plugins_as_sglang_does(doctor, monkeypatch, value):
    """Without spaces; an empty one loads all plugins."""
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    status, lines = doctor()
    assert status == 0 and lines[2] == "plugin: on: SGLang loads the plugin in every process"


def test_doctor_of_a_release_without_hooks(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    status, lines = doctor()
    assert status == 1 and lines[3] == "SGLang's own path runs"
    assert lines[2].startswith("plugin: off: there is no sglang.srt.plugins.hook_registry.")


def test_doctor_of_a_release_whose_layers_are_all_other_ones(doctor, monkeypatch):
    monkeypatch.setitem(sys.modules, interface.RUNNER, None)
    monkeypatch.setattr(MoeRunner, "run", lambda self, dispatched: None)
    status, lines = doctor()
    assert status == 1
    assert lines[2] == "plugin: off: no class of this SGLang is one that moelora can run"
    assert " SGLang's own path: sglang.srt.layers.moe.moe_runner.runner.MoeRunner.run " in lines[3]


@pytest.mark.parametrize(
    "variable, value, why",
    [
        ("SGLANG_PLUGINS", "other", "SGLANG_PLUGINS=other does not name moelora, so SGLang does"),
        ("SGLANG_PLUGINS", ",", "SGLANG_PLUGINS=, does not name moelora, so SGLang does"),
        ("MOELORA_SGLANG", "false", "MOELORA_SGLANG=false"),
    ],
)
def test_doctor_says_why_it_is_off(doctor, monkeypatch, variable, value, why):
    monkeypatch.setenv(variable, value)
    status, lines = doctor()
    assert status == 1
    assert lines[2].startswith(f"plugin: off: {why}") and lines[3] == "SGLang's own path runs"


def test_whatever_fails_leaves_sglang_as_it_was(sglang, monkeypatch, caplog):
    def fails():
        raise RuntimeError("something that nobody thought of")

    monkeypatch.setattr(moelora_sglang, "problem_here", fails)
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        for _ in range(2):
            moelora_sglang.register()
    (line,) = caplog.messages
    assert line.startswith("moelora: could not register: RuntimeError: something that nobody")


def test_a_release_without_hooks(sglang, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with caplog.at_level(logging.INFO, "sglang.moelora"):
        for _ in range(2):
            moelora_sglang.register()
    assert caplog.messages == [
        "moelora: there is no sglang.srt.plugins.hook_registry.HookRegistry.register; "
        "SGLang's own path runs"
    ]
