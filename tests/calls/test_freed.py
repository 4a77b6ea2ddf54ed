"""Tensors whose storage was freed or shrunk, as FSDP and offloading leave them.

torch gives such a tensor its shape still, and the address 0 or one that is not its own. Every
operator refuses it by name, before anything is written, as the C interface does an address of 0.
"""

import copy

import pytest
import test_fp8_checkpoints
import test_packing_refusals
import torch
from cases import same_bits
from glue_cases import E, I, K, R, inputs, op_calls, operator, tensors_in, with_another

import moelora
from moelora.operators import trace

GOOD = test_packing_refusals.GOOD | test_fp8_checkpoints.GOOD
REFUSED = "has elements up to byte .* of a storage of .* bytes: it was freed or shrunk"
# Elements before the first one, and what is left of the storage's bytes.
STORAGES = {
    "freed": (0, lambda nbytes: 0),
    "freed, with an offset": (3, lambda nbytes: 0),
    "one byte short": (0, lambda nbytes: nbytes - 1),
    "as long as its elements, with an offset": (1, None),
}


def without_storage(t, kind="freed"):
    """A tensor like `t` whose storage does not hold its elements any more."""
    offset, left = STORAGES[kind]
    flat = torch.zeros(offset + t.numel(), dtype=t.dtype, device=t.device)
    result = flat[offset:].view(t.shape)
    storage = result.untyped_storage()
    storage.resize_(left(storage.nbytes()) if left else t.numel() * t.element_size())
    return result


def listed(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("kind", STORAGES)
def test_every_operator_refuses_every_argument(device, kind):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for name, args in op_calls(device, dtype):
        arguments = operator(name)._schema.arguments
        written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        before = copy.deepcopy({i: args[i] for i in written})
        for at, index, tensor in tensors_in(args):
            if not tensor.numel():
                continue
            wrong = with_another(args, at, index, without_storage(tensor, kind))
            entry = arguments[at].name + ("" if index is None else rf"\[{index}\]")
            with pytest.raises(RuntimeError, match=f"{entry} {REFUSED}"):
                operator(name)(*wrong)
            for i in set(written) - {at}:
                for now, then in zip(listed(args[i]), listed(before[i]), strict=True):
                    assert same_bits(now, then), f"{name}: {arguments[i].name} was written"


@pytest.mark.parametrize("name", GOOD)
def test_quantized_checkpoints(name):
    """Whole, and one of a list of experts: torch's own operators would read what is not there."""
    make, given = getattr(moelora.QuantizedWeights, name), GOOD[name]
    make(**given)
    for argument, value in given.items():
        with pytest.raises(ValueError, match=f"{argument} {REFUSED}"):
            make(**given | {argument: without_storage(value)})
        with pytest.raises(ValueError, match=rf"{argument}\[1\] {REFUSED}"):
            make(**given | {argument: [value[0], without_storage(value[1])]})
    state = make(**given).state_dict()
    for key, value in state.items():
        with pytest.raises(ValueError, match=f"{key} {REFUSED}"):
            moelora.QuantizedWeights.from_state_dict(state | {key: without_storage(value)})


def test_factors_of_an_adapter():
    layer = moelora.MoELayer("mlp.experts", num_experts=E, hidden_size=K, intermediate_size=I)
    pool = moelora.AdapterPool([layer], 1, R, dtype=torch.float32)
    a, b = torch.ones(E, R, I), torch.ones(E, K, R)
    keys = [f"base_model.model.mlp.experts.down_proj.lora_{side}.weight" for side in "AB"]
    config = {"peft_type": "LORA", "r": R, "lora_alpha": R}
    for key, factors in zip(keys, ((without_storage(a), b), (a, without_storage(b))), strict=True):
        with pytest.raises(ValueError, match=f"adapter 'x': {key} {REFUSED}"):
            pool.add("x", dict(zip(keys, factors, strict=True)), config=config)
    assert not pool.names()
    pool.add("x", dict(zip(keys, (a, b), strict=True)), config=config)


def test_the_meta_device_has_no_storage_to_free():
    given = inputs(device="meta")
    given["w13"] = without_storage(given["w13"])
    assert moelora.fused_experts_lora(**given).is_meta


def test_the_rest_of_a_storage_may_be_gone():
    """A view needs what it addresses, not what lies behind it."""
    given = inputs()
    want = moelora.fused_experts_lora(**given)
    wide = torch.cat([given["w13"], torch.ones(1, 2 * I, K)])
    given["w13"] = wide[:E]
    wide.untyped_storage().resize_(E * 2 * I * K * 4)
    assert same_bits(moelora.fused_experts_lora(**given), want)


def test_a_dump_of_a_freed_tensor(monkeypatch, tmp_path, capsys):
    """The call raises what it raises; nothing reads the tensor."""
    monkeypatch.setattr(trace, "settings", trace.Settings(dump=str(tmp_path)))
    monkeypatch.setattr(trace, "active", True)
    monkeypatch.setattr(trace, "_dumps", iter([0]))
    given = inputs()
    given["w2"] = without_storage(given["w2"])
    with pytest.raises(ValueError, match=f"w2 {REFUSED}"):
        moelora.fused_experts_lora(**given)
    assert not list(tmp_path.iterdir())
    assert "the storage of a tensor of shape (4, 64, 64) was freed" in capsys.readouterr().err
