"""Quantized weights in the operators: values, bits, neutrality, what is refused."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, EDGE_CASES, Spec, random_specs, same_bits
from checks import naming
from holding import hold_base_rows, hold_gemm, hold_layer
from quantized_cases import ALL_FORMATS, DEVICES_AND_DTYPES, build

import moelora

every_device = pytest.mark.parametrize("device, dtype", DEVICES_AND_DTYPES)
every_format = pytest.mark.parametrize("name", ALL_FORMATS)


# ---- values ----


@every_device
@pytest.mark.parametrize("edge", EDGE_CASES)
def test_edge_cases(edge, device, dtype):
    names = list(ALL_FORMATS)
    name = names[list(EDGE_CASES).index(edge) % len(names)]
    p = build(EDGE_CASES[edge], ALL_FORMATS[name], dtype)
    hold_layer(p, device)
    for projection in ("w13", "w2"):
        hold_gemm(p, device, projection, projection == "w2")


@every_device
@every_format
def test_random_problems(name, device, dtype):
    count = 6 if name.startswith("fp8") else 24
    for spec in random_specs(count, first_seed=5000, dtypes=(dtype,)):
        with naming(spec):
            p = build(spec, ALL_FORMATS[name], dtype)
            hold_layer(p, device)
            hold_gemm(p, device, ("w13", "w2")[spec.seed % 2], spec.seed % 3 == 0)


@every_device
@every_format
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_and_depth_that_fill_no_tiles(activation, name, device, dtype):
    """I = 96 and K = 160: halves of gate and up, and depth, that end within a tile."""
    spec = Spec(tokens=37, hidden=160, inter=96, ranks=(16, 5), bias=True, activation=activation)
    spec = replace(spec, slices=1 if activation == "relu2" else 2)
    hold_layer(build(spec, ALL_FORMATS[name], dtype), device)


@every_device
@pytest.mark.parametrize("name", ["mxfp4", "int4_g32_zp", "fp8_block"])
def test_the_shape_of_gpt_oss(name, device, dtype):
    """Of one of six ranks: K = 2880, I = 480, interleaved rows, biases."""
    spec = Spec(
        tokens=3, experts=2, hidden=2880, inter=480, activation="swigluoai", bias=True, slices=1
    )
    hold_layer(build(spec, ALL_FORMATS[name], dtype), device)


@every_device
@pytest.mark.parametrize("tokens, hidden, inter", [(1, 512, 256), (130, 256, 192), (300, 192, 64)])
@pytest.mark.parametrize("pair", [
    ("mxfp4", "int4_g64_zp"),
    ("int4_channel", "mxfp4"),
    ("fp8_block_w8a8", "fp8_channel"),
    ("fp8_b64", "fp8_static_w8a8"),
    ("int4_g32", "fp8_block_w8a8"),
    ("fp8_channel_w8a8", "mxfp4"),
])  # fmt: skip
def test_formats_of_two_kinds(pair, tokens, hidden, inter, device, dtype):
    first, second = (ALL_FORMATS[name] for name in pair)
    spec = Spec(tokens=tokens, hidden=hidden, inter=inter, ranks=(16, 5, 64), mix="many")
    hold_layer(build(spec, first, dtype, second), device)


@every_device
@pytest.mark.parametrize("which", ["w13", "w2"])
def test_one_projection_quantized(which, device, dtype):
    p = build(Spec(tokens=9, hidden=128, inter=96, bias=True), ALL_FORMATS["mxfp4"], dtype)
    weights = getattr(p.to(device), which)
    hold_layer(p.dense, device, lambda **kw: moelora.fused_experts_lora(**{**kw, which: weights}))


@every_device
def test_plain_rows_serve_where_gate_and_up_fill_tiles(device, dtype):
    p = build(Spec(tokens=9, hidden=64, inter=128), ALL_FORMATS["mxfp4"], dtype).to(device)
    want = moelora.fused_experts_lora(**p.kwargs())
    got = moelora.fused_experts_lora(**{**p.kwargs(), "w13": p.w13_plain})
    assert same_bits(got, want)


# ---- bits ----


@every_device
@every_format
def test_base_rows_have_the_bits_of_the_base_layer(name, device, dtype):
    specs = (
        Spec(tokens=17, hidden=96, inter=32, ranks=(3, 17, 1), mix="many", top_k=3),
        Spec(tokens=90, hidden=320, inter=192, ranks=(16,) * 8, mix="half_base"),
        Spec(tokens=32, mix="out_of_range", ranks=(8, 16), routing="out_of_range"),
        Spec(tokens=24, activation="swigluoai", bias=True, mix="half_base"),
    )
    for spec in specs:
        hold_base_rows(build(spec, ALL_FORMATS[name], dtype), device)


@every_device
@every_format
def test_inputs_that_are_not_finite_stay_in_their_rows(name, device, dtype):
    p = build(Spec(tokens=24, hidden=96, inter=96), ALL_FORMATS[name], dtype).to(device)
    want = moelora.fused_experts_lora(**p.kwargs())
    p.dense.hidden_states[5, 3] = float("nan")
    p.dense.hidden_states[11, 95] = float("inf")
    got = moelora.fused_experts_lora(**p.kwargs())
    others = [m for m in range(24) if m not in (5, 11)]
    assert same_bits(got[others], want[others])
    assert not torch.isfinite(got[[5, 11]]).any(dim=1).all()


def test_meta_tensors():
    p = build(Spec(tokens=4, mix="absent"), ALL_FORMATS["mxfp4"], torch.bfloat16).to("cpu")
    arguments = {
        name: value.to("meta") if hasattr(value, "to") else value
        for name, value in p.kwargs().items()
    }
    assert moelora.fused_experts_lora(**arguments).shape == p.dense.hidden_states.shape


# ---- what is refused ----

FP8 = "fp8_tensor_w8a8"
GOOD = {"hidden": 96, "inter": 96, "tokens": 4, "mix": "absent"}


def with_tiles(change):
    return lambda p: {"w13": replace(p.w13, data=change(p.w13.data))}


def fewer_experts(p):
    return {"w2": replace(p.w2, data=p.w2.data[:-1], shape=torch.Size((3, *p.w2.shape[1:])))}


@pytest.mark.parametrize("changes, message", [
    ({"hidden_states": torch.zeros(4, 96)}, "w13 was quantized for bfloat16, expected float32"),
    ({"hidden_states": torch.zeros(4, 96).half()}, "w13 was quantized for bfloat16"),
    ({"hidden_states": torch.zeros(4, 80).bfloat16()}, r"w13.shape\[2\] is 96, expected 80"),
    ({"activation": "swigluoai"}, "order is GATE_UP, expected INTERLEAVED, as the activation"),
    ({"activation": "relu2"}, r"w2.shape\[2\] is 96, expected 192"),
    ({"w13_bias": torch.zeros(4, 192)}, "w13_bias has dtype float32, expected bfloat16 as hid"),
    ({"w13_bias": torch.zeros(4, 200).bfloat16()}, r"w13_bias.size\(1\) is 200, w13_lay"),
    ({"w2_bias": torch.zeros(4, 97).bfloat16()}, r"w2_bias.size\(1\) is 97, hidden_states"),
    (fewer_experts, r"w2.size\(0\) is 3, w13.size\(0\) is 4"),
    (lambda p: {"w13": p.w13_plain}, "w13_layout.order is PLAIN, expected GATE_UP"),
    *((with_tiles(change), message) for change, message in (
        (lambda t: t[:, :1].contiguous(), r"w13.size\(1\) is 1, expected 4 tiles, as w13_layout"),
        (lambda t: t[:, :, :1].contiguous(), r"w13.size\(2\) is 1, expected 2 tiles, as hidden_st"),
        (lambda t: t[..., :-16], r"w13.size\(3\) is 2160, expected the 2176 bytes of a tile of MX"),
        (lambda t: t.flatten(2), "w13 has 3 dimensions, expected 4"),
        (lambda t: t.view(torch.int8).float(), "w13 has dtype float32, expected uint8"),
        (lambda t: t.repeat_interleave(2, 3)[..., ::2], r"w13.stride\(3\) is 2, expect"),
        (lambda t: t.new_empty(*t.shape[:3], t.size(3) + 8)[..., :-8], r"w13.stride\(2\) is 2184"),
        (lambda t: t.new_empty(t.numel() + 8)[8:].view(t.shape), "w13 starts at .* multiple of 16"),
    )),
])  # fmt: skip
def test_arguments_that_do_not_fit(changes, message):
    p = build(Spec(**GOOD), ALL_FORMATS["mxfp4"], torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        moelora.fused_experts_lora(**p.kwargs() | (changes(p) if callable(changes) else changes))


def test_rows_in_an_order_for_something_else():
    p = build(Spec(**GOOD), ALL_FORMATS["mxfp4"], torch.bfloat16)
    with pytest.raises(ValueError, match="w_layout.order is GATE_UP, expected PLAIN"):
        moelora.fused_moe_lora_gemm(**{**p.gemm_kwargs(), "w": p.w13})
    p = build(Spec(**GOOD, activation="swigluoai"), ALL_FORMATS["mxfp4"], torch.bfloat16)
    with pytest.raises(ValueError, match="w13_layout.order is INTERLEAVED, expec"):
        moelora.fused_experts_lora(**{**p.kwargs(), "activation": "silu"})


@pytest.mark.parametrize("name, layout, message", [
    ("mxfp4", (99, 0, 192), "w_layout.format is 99, expected a moelora_format"),
    ("mxfp4", (1, 3, 192), "w_layout.order is 3, expected a moelora_row_order"),
    ("mxfp4", (1, 0, 0), "w_layout.rows is 0, expected 1 to 2147483647"),
    ("mxfp4", (0, 0, 192), "w_layout has order PLAIN and 192 rows, expected zeros"),
    ("mxfp4", (1, 1, 191), "w_layout.rows is 191, expected an even number"),
    ("mxfp4", (1, 0, 192, 1), "w_layout.x is 1, expected 0: x as it is, as its format is MXFP4"),
    ("mxfp4", (0, 0, 0, 1), "w_layout.x is 1, expected 0: x as it is, as its format is native"),
    (FP8, (6, 0, 192, 4), "w_layout.x is 4, expected a moelora_x_format"),
    (FP8, (6, 0, 192, 1, 0.5), "w_layout.x_scale is 0.5, expected 0, as x is not STATIC"),
    (FP8, (6, 0, 192, 3), "w_layout.x_scale is 0, expected a normal float32 above 0"),
    (FP8, (6, 0, 192, 3, 1e300), "w_layout.x_scale is inf"),
    (FP8, (8, 0, 192), r"w.size\(3\) is 8320, expected the 8448 bytes of a tile of FP8 \("),
])  # fmt: skip
def test_layouts_of_the_operator_itself(name, layout, message):
    p = build(Spec(**GOOD), ALL_FORMATS[name], torch.bfloat16)
    absent, d = torch.empty(0), p.dense
    rest = (absent, [], [], *[absent] * 5, False)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moelora.fused_moe_lora_gemm(
            *(d.hidden_states, p.w13_plain.data, d.topk_weights, d.topk_ids, *rest, *layout)
        )


def test_prepacking_gives_them_back():
    p = build(Spec(**GOOD), ALL_FORMATS["mxfp4"], torch.bfloat16)
    assert moelora.prepack_weights(p.w13) is p.w13
