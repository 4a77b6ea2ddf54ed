"""`torch.set_default_device` is for tensors of the caller: moelora names the device of its own.

With "meta" whatever follows the default cannot be read.
"""

import pytest
import torch
from adapter_cases import CONFIG, make_pool, wrapped, write
from quantized_cases import FORMATS, FP8_FORMATS, fp8_numbers, quantize
from tenant_house import House, same


def test_pool(tmp_path):
    pool = make_pool(max_loras=2, host=3)
    state, _ = wrapped()
    folder = write(tmp_path / "a", state)
    with torch.device("meta"):
        pool.register("a", folder)
        pool.add("b", state, config=CONFIG)
        with pool.hold(["a", "b"]) as held:
            mapping = pool.mapping(["b", None, "a"], held=held)
        assert pool.update("b", folder) == 2
    assert mapping.tolist() == [0, -1, 1]


@pytest.mark.parametrize("name", [*FORMATS, *FP8_FORMATS])
def test_packing(name):
    if name in FP8_FORMATS:
        stored = fp8_numbers(name)
    else:
        stored = quantize(torch.randn(2, 128, 192), FORMATS[name])
    wanted = stored.pack(torch.bfloat16, "concatenated")
    with torch.device("meta"):
        got = stored.pack(torch.bfloat16, "concatenated")
        layout = got.state_dict()["layout"]
    assert torch.equal(got.data, wanted.data) and layout.device.type == "cpu"


@pytest.mark.parametrize("is_sparse", [False, True])
def test_tenants(is_sparse):
    names, found = ["law", "code"], []
    for device in ("cpu", "meta"):
        house = House(("cpu", torch.float32, torch.float32, is_sparse))
        for name in names:
            generator = torch.Generator().manual_seed(0)
            with torch.device(device):
                house.add(name, generator=generator)
        for number in range(2):
            losses = house.losses(names, number)
            with torch.device(device):
                house.tenants.step(losses)
        found.append([t for name in names for t in house.factors(name)])
    assert same(*found)
