"""FP8 layers of SGLang in moelora: packed into tiles, or left as they are."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from cases import Spec
from quantized_cases import FP8_FORMATS, fitted, to_fp8
from sglang_stand_in import OWN, dispatched, make_base_layer, run_layer, runner_of
from test_sglang import SPECS

import moelora
import moelora.integrations.sglang as moelora_sglang

pytest_plugins = ["sglang_fixtures"]


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
