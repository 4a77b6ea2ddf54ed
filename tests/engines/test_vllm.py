"""The vLLM drop-in, on stand-ins of vLLM's interface, and on vLLM itself where that imports."""

import logging
import sys
from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Spec, same_bits
from conftest import needs_gpu
from streams import Captured
from vllm_layer import HERE, Layer, base, load, platform

import moelora

pytest_plugins = ["vllm_fixtures"]


# ---- configurations of adapters ----

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": ["experts.down_proj"]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, None),
        ({"lora_B_layout": "rank_major", "auto_mapping": {"unsloth_fixed": True}}, None),
        ({"lora_B_layout": "grouped_by_expert"}, "lora_B_layout of its configuration is not rank"),
        ({"lora_B_layout": "mixed"}, "lora_B_layout is 'mixed', wanted one of"),
        ({"auto_mapping": {"unsloth_fixed": True}}, "an adapter of base: Unsloth wrote the"),
    ],
)
def test_adapters_that_vllm_reads_wrong_are_told(served, lines, more, said):
    for _ in range(2):
        config = {**CONFIG, **more, "base_model_name_or_path": "base"}
        assert served.PEFTHelper.from_dict(config).r == 4
    if said is None:
        assert lines == []
        return
    (line,) = lines
    assert said in line
    assert "every expert will get columns of other experts" in line


# ---- registration ----


def test_the_interface_is_as_recorded(vllm):
    parts = ("LAYERS", "DELTAS", "CONFIGS", "QUANTIZED")
    problems = {part: vllm.interface.problem(getattr(vllm.interface, part)) for part in parts}
    assert problems == dict.fromkeys(parts)
    methods = {n: vllm.interface.problem(m) for n, m in vllm.methods.items()}
    absent = {name for name, problem in methods.items() if problem}
    assert absent in (set(), {"compressed_tensors"}, {"compressed_tensors_marlin"})


def test_the_log_says_once_that_it_serves_layers(vllm, lines, caplog):
    """When the first one runs: in process, vLLM loads plugins before it configures its log."""
    vllm.register()
    with caplog.at_level(logging.INFO, "vllm.moelora"):
        vllm.register()
        layer = Layer(vllm, Spec(mix="absent").build())
        assert lines == []
        layer()
        layer()
    (line,) = lines
    assert line.startswith(
        f"moelora: version {moelora.__version__} runs MoE layers; MOELORA_VLLM=0"
    )


def test_registering_twice_is_registering_once(vllm, lines):
    vllm.register()
    ours = vllm.chosen()
    assert ours.__name__ == "TritonExpertsWithLoRA"
    assert issubclass(ours, vllm.TritonExperts)
    prepare_tensors, set_lora = vllm.LoRAKernelMeta.prepare_tensors, vllm.FusedMoEWithLoRA.set_lora
    vllm.register()
    assert vllm.chosen() is ours
    assert vllm.LoRAKernelMeta.prepare_tensors is prepare_tensors
    assert vllm.FusedMoEWithLoRA.set_lora is set_lora
    assert lines == []


def test_other_backends_keep_their_class(served):
    oracle = load("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    (other,) = oracle.backend_to_kernel_cls(served.UnquantizedMoeBackend.FLASHINFER_CUTLASS)
    assert "Triton" not in other.__name__


def half_an_interface(vllm):
    vllm.monkeypatch.delattr(vllm.LoRAKernelMeta, "prepare_tensors")
    vllm.monkeypatch.setattr(vllm.TritonExperts, "apply", None)


def patched(place, value):
    return lambda vllm: vllm.monkeypatch.setattr(place, value)


def on(**of_platform):
    return lambda vllm: vllm.set("vllm.platforms", "current_platform", platform(**of_platform))


SHAPES = "vllm.model_executor.layers.fused_moe.experts.triton_moe.TritonExperts.workspace_shapes"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (lambda vllm, v=value: vllm.monkeypatch.setenv("MOELORA_VLLM", v), None)
            for value in ("0", "false", "Off", "no")
        ),
        (
            patched(SHAPES, lambda self, M, N, K: None),
            "workspace_shapes has the parameters ['self', 'M', 'N', 'K'], not",
        ),
        (half_an_interface, "prepare_tensors"),
        # It fails after hooks of the first parts, which are then undone.
        (
            patched(f"{HERE}.experts.install", lambda: 1 / 0),
            "could not register: ZeroDivisionError: division by zero",
        ),
        (on(cuda=False), "the platform is not CUDA"),
        (on(capability=75), "there is no GPU of compute capability 8.0 or newer"),
        (
            patched("moelora._C.WITH_CUDA", 0),
            "this build of moelora has no CUDA kernels (it was made without nvcc: ",
        ),
    ],
)
def test_vllm_is_left_as_it_was(vllm, lines, monkeypatch, change, said):
    """One line, without a traceback."""
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    monkeypatch.setattr("moelora._C.has_cuda", lambda: pytest.fail("that initializes CUDA"))
    vllm.set("vllm.platforms", "current_platform", platform())
    change(vllm)
    for _ in range(2):
        vllm.plugin.register()
    assert vllm.chosen() is vllm.TritonExperts
    hook = getattr(vllm.LoRAKernelMeta, "prepare_tensors", None)
    assert not hasattr(hook, "_moelora")
    assert len(lines) == (said is not None)
    assert all(said in one and one.endswith("; vLLM's own path runs") for one in lines)


CHANGED = [  # a function, another of its part, what the log says
    (
        "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU",
        *("add_lora_w2", "add_lora_w13"),
        "vLLM's own kernels add the adapters of its layers",
    ),
    (
        "vllm.model_executor.layers.quantization.auto_gptq.AutoGPTQMoEMethod",
        *("process_weights_after_loading", "__init__"),
        "vLLM's own path runs for layers of AutoGPTQMoEMethod",
    ),
]


@pytest.mark.parametrize(("place", "name", "other", "said"), CHANGED)
def test_a_part_that_changed_is_left_alone(vllm, lines, place, name, other, said):
    patched(f"{place}.{name}", lambda self, x, more: None)(vllm)
    vllm.register()
    module, _, owner = place.rpartition(".")
    assert not hasattr(getattr(getattr(load(module), owner), other), "_moelora")
    (line,) = lines
    assert "has the parameters ['self', 'x', 'more'], not ['self', " in line and said in line
    assert vllm.FusedMoEWithLoRA.set_lora._moelora, "the other parts are there"


# ---- results ----

SPECS = {
    "base_only": Spec(mix="absent", tokens=9),
    "base_only_with_map": Spec(mix="absent", tokens=9, remote=4),
    "several_adapters": Spec(mix="many", tokens=17, ranks=(8, 8, 8)),
    "ranks_and_room": Spec(mix="all_different", tokens=10, ranks=(1, 24, 3, 17), spare_rank=8),
    "biases_of_gelu": Spec(activation="gelu", bias=True, tokens=8),
    "situ_without_a_linear_beta": Spec(activation="situ", alpha=4.0, tokens=8),
    "expert_ids_out_of_range_with_map": EDGE_CASES["expert_ids_out_of_range_with_map"],
}
NAMES = "one_adapter half_base disabled_adapters shared_outer one_slice swigluoai relu2 swiglustep "
NAMES += "silu_with_a_limit swigluoai_uninterleave_one_slice situ_with_small_caps expert_map "
NAMES += "weight_on_input int64_ids many_rows"
SPECS |= {name: EDGE_CASES[name] for name in NAMES.split()}


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_is_what_the_reference_says(make_layer, name):
    layer = make_layer(SPECS[name])
    layer.check(layer())
    assert layer.vllm.own_calls == 0


def test_ranks_below_the_maximum_are_used(make_layer):
    """The padding of the stacks is never read: here it would show."""
    layer = make_layer(Spec(ranks=(3, 8, 16), mix="all_different", tokens=12, spare_rank=8))
    ranks = layer.experts._lora_context.lora_ranks
    assert ranks.tolist() == [3, 8, 16]
    layer.fill_padding(float("nan"))
    layer.check(layer())

    layer.load_adapter(2, rank=5)  # another adapter comes to the slot, in the same tensor
    assert layer.experts._lora_context.lora_ranks is ranks
    assert ranks.tolist() == [3, 8, 5]


TWO_RANKS = Spec(ranks=(8, 16), mix="all_different", tokens=12)


def with_one_a(place, slot):
    """A problem in which gate and up of a slot have one A, as adapters of fused weights do."""
    p = replace(TWO_RANKS, dtype=place[1]).build()
    gate, up = p.w13_lora_a
    up[slot] = gate[slot]
    return p


def test_one_a_for_gate_and_up_is_read_once(make_layer, place):
    """Adapters of fused weights have it twice in vLLM's stacks."""
    layer = make_layer(with_one_a(place, 1))
    table = layer.experts._lora_context.w13_one_a
    assert table.tolist() == [0, 1]
    layer.lora.w13_lora_a_stacked[1][1].fill_(float("nan"))
    layer.check(layer())

    layer.p.w13_lora_a[1][1].neg_()  # another adapter comes to the slot
    layer.load_adapter(1)
    assert table.tolist() == [0, 0]
    layer.check(layer())


def test_an_adapter_that_vllm_cannot_load_is_read_as_far_as_it_was_written(make_layer, place):
    """Its slot is enabled then: nothing that was known of the adapter before it holds."""
    p = with_one_a(place, 0)
    layer = make_layer(p)
    context = layer.experts._lora_context
    assert context.w13_one_a.tolist() == [1, 0] and context.lora_ranks.tolist() == [8, 16]
    largest = layer.lora.w2_lora_a_stacked[0].size(2)

    a, b = ([t[0][:, :, :7] for t in some] for some in ([*p.w13_lora_a], [*p.w13_lora_b]))
    with pytest.raises(Exception):  # noqa: B017 # whatever vLLM raises
        layer.lora.set_lora(0, [a[0], None, a[1]], [b[0], None, b[1]])
    assert layer.lora.adapter_enabled[0] == 1
    assert context.w13_one_a.tolist() == [0, 0]
    assert context.lora_ranks.tolist() == [largest, 16]

    layer.load_adapter(0)
    assert context.w13_one_a.tolist() == [1, 0] and context.lora_ranks.tolist() == [8, 16]
    layer.check(layer())


def test_a_stale_mapping_is_not_used(make_layer):
    """After a step with adapters comes one without: vLLM does not rewrite its mapping."""
    layer = make_layer(Spec(mix="all_different", tokens=8))
    layer.check(layer())
    plain = make_layer(base(layer.p))()
    layer.step(torch.full((8,), -1))
    assert same_bits(layer(), plain)
    # A graph that was captured with adapters does not see the flag on the host.
    layer.meta.no_lora_flag_cpu.fill_(False)
    assert same_bits(layer(), plain)


def test_padding_rows_are_base_rows(make_layer):
    """A graph runs more rows than there are tokens; the mapping behind them is left over."""
    layer = make_layer(Spec(mix="all_different", tokens=12))
    whole = layer()
    layer.step(layer.p.token_lora_mapping[:7])
    assert layer.meta.token_lora_mapping[7:].eq(-1).all()
    padded = layer()
    assert same_bits(padded[:7], whole[:7])
    assert same_bits(padded[7:], make_layer(base(layer.p))()[7:])


def test_slots_out_of_range_are_base_rows(served, place, make_layer):
    """Before any step the mapping is uninitialized memory; no slot is enabled then either."""
    device, dtype = place
    layer = Layer(served, Spec(mix="all_different", tokens=12, dtype=dtype).build(), device)
    layer.lora.reset_lora(0)
    assert same_bits(layer(), make_layer(base(layer.p))())


def test_an_exchanged_mapping_comes_first(make_layer):
    """Expert parallel over data-parallel ranks: their tokens, though ours have no adapter."""
    layer = make_layer(Spec(mix="many", tokens=9, remote=4))
    layer.step(torch.full((9,), -1))
    layer.experts._lora_context.local_token_lora_mapping = layer.p.token_lora_mapping
    layer.check(layer())


def test_removed_adapters_no_longer_act(make_layer):
    layer = make_layer(Spec(mix="one", tokens=6))
    layer.check(layer())
    slot = int(layer.p.token_lora_mapping[0])
    layer.lora.reset_lora(slot)
    for stack, _ in layer.stacks():
        stack[slot] = float("nan")  # a disabled slot is not read
    assert same_bits(layer(), make_layer(base(layer.p))())
    layer.load_adapter(slot)
    layer.check(layer())


@pytest.mark.gpu
@needs_gpu
def test_one_capture_serves_every_step(served):
    """Other slots, other ranks, no adapter at all, fewer tokens: what a serving engine replays."""
    if "vllm.v1.worker.workspace" in sys.modules:
        pytest.skip("the end-to-end benchmark covers it")
    p = Spec(mix="all_different", tokens=16, ranks=(8, 16, 4), dtype=torch.bfloat16).build()
    layer = Layer(served, p, "cuda").step()
    replay = Captured(layer).replay
    mixed = replay()
    layer.check(mixed)
    plain = Layer(served, base(p), "cuda")()
    layer.step(torch.full((16,), -1))
    assert same_bits(replay(), plain)
    layer.step(p.token_lora_mapping[:5])
    assert same_bits(replay(), torch.cat([mixed[:5], plain[5:]]))
    layer.step()
    for slot in range(3):
        layer.lora.reset_lora(slot)
    assert same_bits(replay(), plain)
    for slot in range(3):
        layer.load_adapter(slot)
    assert same_bits(replay(), mixed)
