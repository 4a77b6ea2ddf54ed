"""Layers of vLLM that moelora leaves to vLLM's own kernels, and what the log says of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in
from cases import Spec
from vllm_layer import HERE, Layer, load

pytest_plugins = ["vllm_fixtures"]

APART = "swigluoai_uninterleave"


def own_path(layer, lines, reason, repeat=3):
    """The layer runs vLLM's kernels, and the log says once why, in words that begin so."""
    for _ in range(repeat):
        y = layer.step()() if layer.lora is not None else layer()
        assert (y == layer.vllm.OWN).all()
    assert layer.vllm.own_calls == repeat
    (line,) = lines
    assert line.startswith(f"moelora: {reason}") and line.endswith("; vLLM's own path runs")


def quant_config(name, *args, **kwargs):
    return getattr(load("vllm.model_executor.layers.fused_moe.config"), name)(*args, **kwargs)


def swiglu(limit, alpha, beta):
    return {"swiglu_limit": limit, "swiglu_alpha": alpha, "swiglu_beta": beta}


def test_a_quantized_base(served, lines):
    quant = quant_config("fp8_w8a8_moe_quant_config", torch.ones(1), torch.ones(1))
    layer = Layer(served, Spec(mix="absent").build(), quant=quant)
    # vLLM quantizes the input on the way, with an operator that the CPU has not.
    layer.kernel = vllm_stand_in.FusedMoEKernel(None, layer.experts)
    own_path(layer, lines, "the base is quantized (torch.float8_e4m3fn)")


def test_numbers_of_the_quantizations_config_go_first(served):
    numbers = {"gemm1_clamp_limit": 0.5, "gemm1_alpha": 1.2, "gemm1_beta": 1.0}
    for spec in (Spec(limit=0.5), Spec(activation=APART, alpha=1.2, limit=0.5)):
        quant = quant_config("biased_moe_quant_config", None, None, **numbers)
        layer = Layer(served, spec.build(), quant=quant, **swiglu(7.0, 1.702, 0.5))
        layer.check(layer.step()())


SILUS = swiglu(0.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("spec", "config", "activation"),
    [
        # A linear beta that is not positive is none, as vLLM's kernel has it.
        (Spec(activation="situ", alpha=4.0), {"activation_situ_linear_beta": 0.0}, "situ"),
        (Spec(activation="situ", alpha=4.0), {"activation_situ_linear_beta": -1.0}, "situ"),
        # These take no numbers from configurations.
        (Spec(activation="swigluoai", slices=1), SILUS, "swigluoai"),
        (Spec(activation="swiglustep", slices=1), SILUS, "swiglustep"),
        (Spec(limit=0.5), SILUS, APART),  # another name for silu with a limit
    ],
)
def test_numbers_of_other_activations(served, spec, config, activation):
    layer = Layer(served, spec.build(), **config)
    layer.activation = served.MoEActivation(activation)
    layer.check(layer.step()())


def activation(name):
    return lambda layer: setattr(layer, "activation", layer.vllm.MoEActivation[name])


def shard_adapters(layer):
    layer.step()()
    layer.experts._lora_context.fully_sharded = True
    layer.experts.set_lora_context(layer.experts._lora_context)


def hook_rows(layer):
    layer()
    layer.experts.post_gemm2_hook = lambda rows, output: None


def offload(layer):
    layer.p.w2._vllm_is_uva_offloaded = True


def of_doubles(layer):
    weights = {n: getattr(layer.p, n).double() for n in ("hidden_states", "w13", "w2")}
    layer.p = replace(layer.p, **weights)


def without_kernels(layer):
    """A driver that is too old, another family: found by a launch in the worker, not by users."""
    for name in ("served", "deltas"):
        layer.vllm.set(f"{HERE}.{name}", "reason_against_device", lambda: NO_IMAGE)


# It has what the plugin replaces, and something that it reads is different.


def other_mapping(layer):
    layer.experts._lora_context.punica_wrapper = SimpleNamespace(mapping=layer.meta)


def other_limit(layer):
    layer.experts.quant_config.gemm1_clamp_limit = torch.tensor([7.0, 8.0])  # one for each expert


def no_limit(layer):
    del layer.experts.moe_config.swiglu_limit


SILU, SITU, OAI = Spec(), Spec(activation="situ"), Spec(activation=APART)
OF_HALVES = Spec(activation="swigluoai", slices=2)
NO_GATE = Spec(activation="relu2", slices=1)
OWN_PAIRS = "gate and up have adapters of their own, while their weights are interleaved"
NO_IMAGE = "kernels of this build do not run on the H900: no kernel image is available"
UNEXPECTED = "the layer is not as expected ("


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (SILU, {"swiglu_limit": 0.0}, "the limit of silu is 0.0"),
        (SITU, {"activation_situ_linear_beta": 25.0}, "situ has beta None"),
        (SITU, {"activation_situ_beta": 0.0}, "situ has beta 0.0"),
        (OAI, swiglu(7.0, 1.702, 0.5), f"{APART} has limit 7.0, alpha 1.702 and beta 0.5"),
        (OAI, swiglu(None, 1.702, 1.0), f"{APART} has limit None, alpha 1.702 and beta 1.0"),
        (OAI, swiglu(7.0, None, 1.0), f"{APART} has limit 7.0, alpha None and beta 1.0"),
        (OAI, swiglu(7.0, 1.702, None), f"{APART} has limit 7.0, alpha 1.702 and beta None"),
        (OF_HALVES, {}, OWN_PAIRS),
        (Spec(slices=1), activation("GELU"), "there is no activation 'gelu'"),
        (NO_GATE, activation("SILU_NO_MUL"), "there is no activation 'silu_no_mul'"),
        (SILU, shard_adapters, "the adapters are fully sharded"),
        (SILU, offload, "the expert weights are in host memory"),
        (Spec(mix="absent"), hook_rows, "the rows before the weighted sum are wanted"),
        # All that the operator has no kernel for, or that breaks its contract, is the same.
        (Spec(mix="absent"), of_doubles, "fused_experts_lora_out: hidden_states has dtype float64"),
        (SILU, without_kernels, NO_IMAGE),
        *((SILU, change, UNEXPECTED) for change in (other_mapping, other_limit, no_limit)),
    ],
)
def test_what_is_not_there_runs_vllms_own_path(served, lines, spec, change, reason):
    """`change`: of the configuration, or of the layer."""
    layer = Layer(served, spec.build(), **({} if callable(change) else change))
    if callable(change):
        change(layer)
    own_path(layer, lines, reason)


def test_fully_sharded_adapters(served, lines):
    """They are not, in a layer that moelora runs."""
    layer = Layer(served, Spec().build(), fully_sharded=True)
    layer.check(layer.step()())
    assert not layer.lora.fully_sharded
    said = "adapters of experts are not sharded over ranks: fully_sharded_loras is off"
    assert lines == [f"moelora: {said}"]
    lines.clear()
    other = Layer(served, Spec().build(), fully_sharded=True, swiglu_limit=0.0)
    assert other.lora.fully_sharded
    own_path(other, lines, "the limit of silu is 0.0")


@pytest.mark.parametrize("exchange_is_known", [True, False])
def test_data_parallel_ranks_have_slots_of_their_own(vllm, lines, exchange_is_known):
    """In a release whose exchange is another one, adapters do not travel by ids."""
    if not exchange_is_known:
        place = "vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep"
        vllm.monkeypatch.delattr(load(place), "MoEPrepareAndFinalizeNaiveDPEPModular")
    vllm.register()
    Layer(vllm, Spec().build())
    assert not lines
    for _ in range(2):
        Layer(vllm, Spec().build(), dp_size=2)
    said = [line for line in lines if "requests can get each other's, with moelora" in line]
    assert len(said) == len(lines) == (not exchange_is_known)


def test_batch_invariance(vllm, lines):
    """vLLM's switch is no reason to step aside."""
    vllm.set("vllm.envs", "VLLM_BATCH_INVARIANT", True)
    layer = Layer(vllm.register(), Spec().build())
    assert layer.experts.reason_against(layer.activation) is None


def test_other_classes_are_named(served, lines):
    """Layers that vLLM gives to other kernels do not come here at all."""
    layer = Layer(served, Spec(mix="absent").build())
    assert lines == []
    theirs = served.TritonExperts(layer.moe_config, layer.experts.quant_config)
    for _ in range(2):
        served.FusedMoEKernel(served.MoEPrepareAndFinalizeNoDPEPModular(), theirs)
    (line,) = lines
    assert line == "moelora: vLLM gives unquantized layers to TritonExperts; vLLM's own path runs"
