"""`target_parameters` factors of every version of PEFT, where shapes do not tell their layout.

PEFT until 0.18 took every parameter for (E, in, out), 0.19.0 exchanged both kinds, later ones none.
"""

import pytest
import torch
from adapter_cases import CONFIG, E, assert_unchanged, rand, snapshot, write

from moelora.adapters import AdapterPool, MoELayer
from moelora.adapters.config import LoraConfig

R = 3
OLMOE = MoELayer("model.layers.0.mlp.experts", E, 32, 16)  # K = 2I: gate_up_proj is square
GPT_OSS = MoELayer("model.layers.0.mlp.experts", E, 16, 16, interleaved=True)  # down_proj is
ARIA = MoELayer("model.layers.0.mlp.experts", E, 32, 16, transposed=True)


def wrapper(layer, projection, as_stored):
    """Factors as PEFT makes them, and delta (E, out, in).

    `as_stored`: PEFT takes the stored parameter for (E, in, out), and its delta
    `einsum("o r e, e r i -> e i o")` is added to that; otherwise for (E, out, in).
    """
    wide, tall = layer.shape(projection)
    transposed = layer.transposed or layer.interleaved
    stored = (wide, tall) if transposed else (tall, wide)
    columns, rows = stored if as_stored else stored[::-1]
    a, b = rand(E * R, columns), rand(rows, R * E)
    axes = "ore,eri->eio" if as_stored else "ore,eri->eoi"
    delta = torch.einsum(axes, b.double().view(rows, R, E), a.double().view(E, R, columns))
    return a, b, delta.transpose(1, 2) if transposed else delta


def adapter(layer, projections, as_stored, seed=0):
    """The checkpoint of an adapter of `projections`, and delta of each."""
    torch.manual_seed(seed)
    state, deltas = {}, {}
    for depth, projection in enumerate(reversed(projections)):
        a, b, deltas[projection] = wrapper(layer, projection, as_stored)
        key = f"base_model.model.{layer.name}" + depth * ".base_layer"
        state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return state, deltas


def config(projections, version):
    names = {"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
    options = {"r": R, "lora_alpha": R, "target_parameters": [names[p] for p in projections]}
    return CONFIG | options | ({} if version is None else {"peft_version": version})


def one_slot(layer):
    return AdapterPool([layer], 1, R, dtype=torch.float32, w13_slices=1)


def check(pool, layer, deltas):
    stacks = pool.layer(layer.name)
    for projection, name in (("gate_up", "w13"), ("down", "w2")):
        a, b = stacks[f"{name}_lora_a"][0].double(), stacks[f"{name}_lora_b"][0].double()
        wanted = deltas.get(projection, torch.zeros(E, b.size(1), a.size(2), dtype=a.dtype))
        torch.testing.assert_close(b @ a, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "square", "version", "as_stored"),
    [
        (OLMOE, "gate_up", "0.18.0", True),
        (OLMOE, "gate_up", "0.18.1", True),
        (OLMOE, "gate_up", "0.19.0", True),
        (OLMOE, "gate_up", "0.19.1", False),
        (OLMOE, "gate_up", "0.19.1+moelora.0.1.0", False),
        (OLMOE, "gate_up", "0.21.2", False),
        (OLMOE, "gate_up", "1.0.0", False),
        (GPT_OSS, "down", "0.18.1", True),
        (GPT_OSS, "down", "0.19.1", True),
        (ARIA, "gate_up", "0.18.0", True),
        (ARIA, "gate_up", "0.20.0", True),
    ],
)
def test_the_version_decides_where_the_shapes_do_not(tmp_path, layer, square, version, as_stored):
    state, deltas = adapter(layer, [square], as_stored)
    pool = one_slot(layer)
    pool.add("a", write(tmp_path / "a", state, config([square], version)))
    check(pool, layer, deltas)


@pytest.mark.parametrize(
    ("layer", "square", "version"),
    [
        (OLMOE, "gate_up", None),
        (OLMOE, "gate_up", "0.20.0.dev0@UNKNOWN"),
        (OLMOE, "gate_up", "new"),
        (OLMOE, "gate_up", "9" * 10_000),
        (GPT_OSS, "down", None),
        (GPT_OSS, "down", "0.19.0"),  # depended on the version of transformers
    ],
)
def test_what_nothing_decides_is_refused(layer, square, version):
    pool = one_slot(layer)
    other = {"gate_up": "down", "down": "gate_up"}[square]
    pool.add("kept", adapter(layer, [other], False)[0], config=config([other], version), pin=True)
    before = snapshot(pool)
    pool.pin("kept", False)
    state, _ = adapter(layer, [square], False)
    with pytest.raises(ValueError, match=r"experts\.lora_A.* fits both layouts.* peft_version"):
        pool.add("a", state, config=config([square], version))
    assert_unchanged(pool, before)


@pytest.mark.parametrize("version", [None, "0.18.0", "0.21.2"])
@pytest.mark.parametrize("as_stored", [False, True])
@pytest.mark.parametrize("layer", [OLMOE, GPT_OSS, MoELayer(OLMOE.name, E, 16, 24)])
def test_one_shape_decides_for_all(layer, as_stored, version):
    """Whatever the version says: PEFT keeps that of a configuration which it loads and saves."""
    both = ["gate_up", "down"]
    state, deltas = adapter(layer, both, as_stored)
    pool = one_slot(layer)
    pool.add("a", state, config=config(both, version))
    check(pool, layer, deltas)


def test_layouts_do_not_mix():
    both, layer = ["gate_up", "down"], MoELayer(OLMOE.name, E, 16, 24)
    (state, _), (old, _) = (adapter(layer, both, as_stored) for as_stored in (False, True))
    key = f"base_model.model.{layer.name}.lora_B.weight"
    with pytest.raises(ValueError, match=r"lora_B.weight: shape is \(24, 12\), wanted \(16, 12\)"):
        one_slot(layer).add("a", state | {key: old[key]}, config=config(both, "0.21.2"))
    for side in "AB":
        half = {key: factor for key, factor in old.items() if f"lora_{side}" in key}
        with pytest.raises(ValueError, match=r"lora_[AB]\.weight has no .*lora_[AB]\.weight"):
            one_slot(layer).add("a", half, config=config(both, "0.18.0"))


def test_a_configuration_of_peft():
    """Its object says what its JSON does."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["down_proj"], use_rslora=True)
    parsed, plain = LoraConfig.parse(config), LoraConfig.parse(config.to_dict())
    assert parsed.rank_and_scaling("down_proj") == plain.rank_and_scaling("down_proj") == (4, 4.0)
    assert parsed.target_parameters == plain.target_parameters == {"down_proj"}
