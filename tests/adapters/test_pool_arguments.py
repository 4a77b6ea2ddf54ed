"""Arguments of an `AdapterPool` that are none: a ValueError names the argument, got and wanted.

Nothing has changed by then. What checkpoints and `Adapter`s hold: test_fuzz_adapters.py and
test_pool_fits.py.
"""

import pytest
import torch
from adapter_cases import CONFIG, LAYERS, wrapped

from moelora.adapters import AdapterPool, LinearLayer, MoELayer

STATE, _ = wrapped()
NAME = LAYERS[0].name
MADE_OF = {
    "layers": [
        (None, "layers is a NoneType, wanted a sequence of MoELayer"),
        (LAYERS[0], "layers is a MoELayer, wanted a sequence of MoELayer"),
        ("experts", "layers is 'experts', wanted a sequence of MoELayer"),
        ([NAME], r"layers\[0\] is a str, wanted a MoELayer"),
        ([LAYERS[0]] * 2, "wanted at least one and no name twice"),
        ([MoELayer("x", 0, 16, 24)], r"layers\[0\].num_experts is 0, wanted an integer >= 1"),
        ([MoELayer("x", 4, "16", 24)], r"layers\[0\].hidden_size is '16', wanted an integer"),
        ([MoELayer(None, 4, 16, 24)], r"layers\[0\].name is None, wanted a string"),
    ],
    "linears": [
        (None, "linears is a NoneType, wanted a sequence of LinearLayer"),
        (LAYERS, r"linears\[0\] is a MoELayer, wanted a LinearLayer"),
        ([LinearLayer("q", 2, 3)] * 2, "wanted at least one and no name twice"),
        ([LinearLayer("q", -1, 3)], r"linears\[0\].in_features is -1, wanted an integer"),
    ],
    "device": [
        ("cudo", "device is 'cudo', wanted a device of torch"),
        (None, "device is None, wanted a device of torch"),
        ("meta", "device is 'meta', wanted a device with memory"),
    ],
    "places": [
        ([NAME], "places is a list, wanted a mapping"),
        ({NAME: "cpu"}, r"places\['model.layers.0.mlp.experts'\] is 'cpu', wanted \(device, dtyp"),
        ({NAME: ("meta", torch.float32)}, r"places\[.*\] is 'meta', wanted a device with memory"),
        ({NAME: ("cpu", torch.float64)}, "dtype is torch.float64"),
        ({"x": ("cpu", torch.float32)}, "places names x, which is none of the layers"),
    ],
    "others": [([NAME], "others is a list, wanted a mapping")],
    "own": [(3, "own is 3, wanted a function")],
    "shared_outer": [("no", "shared_outer is 'no', wanted True or False")],
    "w13_slices": [(n, f"w13_slices is {n}, wanted 1 or 2") for n in (True, 3)],
    "dtype": [(torch.float64, "dtype is torch.float64")],
    "max_linear_rank": [(0, "max_linear_rank is 0, wanted an integer >= 1")],
    "host": [(n, f"host is {n!r}, wanted an integer >= 0") for n in (-1, "4", None, 2.5, True)],
}
for name in ("max_loras", "max_rank"):
    MADE_OF[name] = [
        (n, f"{name} is {n!r}, wanted an integer >= 1") for n in (0, 2.5, "16", True, None)
    ]


def make_pool(**options):
    sizes = {"layers": LAYERS, "max_loras": 2, "max_rank": 8, "dtype": torch.float32}
    return AdapterPool(**{**sizes, **options})


@pytest.mark.parametrize(
    ("name", "value", "why"), [(name, *each) for name, all_ in MADE_OF.items() for each in all_]
)
def test_what_a_pool_is_made_of(name, value, why):
    with pytest.raises(ValueError, match=why):
        make_pool(**{name: value})


@pytest.fixture(params=[0, 4], ids=["slots alone", "host memory"])
def pool(request):
    pool = make_pool(host=request.param)
    pool.add("a", STATE, config=CONFIG)
    yield pool
    assert pool.names() == ["a"] and pool.version("a") == 1
    pool.add("b", STATE, config=CONFIG)
    pool.add("c", STATE, config=CONFIG)
    assert "a" not in pool, "it is still neither pinned nor held"


@pytest.mark.parametrize("name", [None, 3, "", b"a", ["a"], {}], ids=repr)
def test_what_is_no_name(name, pool):
    methods = ["lookup", "remove", "enable", "disable", "version", "pin", "ready"]
    calls = [getattr(pool, method) for method in methods]
    calls.append(lambda name: pool.add(name, STATE, config=CONFIG))
    calls.append(lambda name: pool.update(name, STATE, config=CONFIG))
    if pool.host:
        calls.append(lambda name: pool.register(name, STATE, config=CONFIG))
    for call in calls:
        with pytest.raises(ValueError, match="name is .*, wanted a non-empty string"):
            call(name)


def test_the_name_of_the_base_model_is_not_given_to_an_adapter(pool):
    for give in (pool.add, *([pool.register] if pool.host else [])):
        with pytest.raises(ValueError, match="name is '__base__', which stands for no adapter"):
            give("__base__", STATE, config=CONFIG)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (None, "names is None, wanted a list of names"),
        (3, "names is 3, wanted a list of names"),
        ("a", "names is the string 'a', wanted a list of names"),
        (["a", 3], "names has 3, wanted names of adapters, None for none"),
        (["a", ["a"]], r"names has \['a'\], wanted names of adapters, None for none"),
    ],
)
def test_what_are_no_names(names, why, pool):
    for call in (pool.mapping, pool.keep, *([pool.prefetch] if pool.host else [])):
        with pytest.raises(ValueError, match=why):
            call(names)


@pytest.mark.parametrize("flag", ["no", None, 1], ids=repr)
def test_what_is_no_flag(flag, pool):
    for name, call in (
        ("replace", lambda: pool.add("a", STATE, config=CONFIG, replace=flag)),
        ("pin", lambda: pool.add("n", STATE, config=CONFIG, pin=flag)),
        ("pinned", lambda: pool.pin("a", flag)),
        ("layerwise", lambda: pool.keep(["a"], layerwise=flag)),
    ):
        with pytest.raises(ValueError, match=f"^{name} is {flag!r}, wanted True or False"):
            call()


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ([0, 0], "out is a list, wanted an int32 tensor"),
        (torch.zeros(1, dtype=torch.int32), r"out is torch.int32 \(1,\), wanted int32 \(2,\) or"),
        (torch.zeros(2, dtype=torch.int64), r"out is torch.int64 \(2,\), wanted int32 \(2,\) or"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "out is on meta, wanted cpu"),
    ],
)
def test_where_a_mapping_cannot_go(out, why, pool):
    with pytest.raises(ValueError, match=why):
        pool.mapping(["a", None], out=out)


def test_what_is_not_held(pool):
    for held in (3, True, "a", pool):
        with pytest.raises(ValueError, match="held is .*, wanted what hold or keep returned"):
            pool.mapping(["a"], held=held)
