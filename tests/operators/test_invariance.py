"""Batch invariance: a row has the bits that it has in any other batch."""

import pytest
from conftest import needs_gpu, on_gpu

from benchmarks import invariance
from moelora import _C


def names(device):
    return [name for name, _ in invariance.pools(device)]


def made(name, device):
    return dict(invariance.pools(device))[name]()


def differing(counts):
    return {name: count["differing"] for name, count in counts.items()}


# Large layers take a second or more in each dtype; bfloat16 stands for them in CI.
LARGE = [f"{shape} {word}" for shape in ("qwen3", "mixtral") for word in ("f16", "f32")]


@pytest.mark.parametrize(
    "device, name",
    [
        *(
            pytest.param("cpu", name, marks=[pytest.mark.slow] if name in LARGE else [])
            for name in names("cpu")
        ),
        *(on_gpu("cuda", name) for name in names("cuda")),
    ],
)
def test_rows_of_random_compositions(device, name):
    p = made(name, device)
    found = differing(p.count(p.reference(), 6 if device == "cpu" else 30))
    assert found == dict.fromkeys(found, 0)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer bf16", "narrow f16", "deep bf16", "vllm bf16"])
@pytest.mark.parametrize("capability", [0, 80])
def test_rows_of_every_variant(name, capability):
    p = made(name, "cuda")
    _C.limit_capability(capability)
    try:
        want = p.reference()
        for variant in invariance.forced(p, "cuda"):
            _C.force_variant(variant)
            found = differing(p.count(want, 4))
            assert found == dict.fromkeys(found, 0), variant
    finally:
        _C.force_variant(None)
        _C.limit_capability(0)


def test_a_row_that_depends_on_its_batch_is_counted(monkeypatch, device):
    """By the number of its neighbors: as many elements as the rows of all compositions have."""
    p = made("narrow f16", device)
    alone = p.operators["layer"]

    def crowded(problem, index):
        y = alone(problem, index)
        return y + (index.numel() % 2 == 0)

    want = p.reference()
    monkeypatch.setitem(p.operators, "layer", crowded)
    found = differing(p.count(want, 12))
    assert found.pop("layer") > 0
    assert not any(found.values())


def test_no_composition_begins_behind_the_deadline(capsys):
    words = ["--device", "cpu", "--only", "narrow f16", "--deadline-s"]
    assert invariance.main([*words, "1e6", "--compositions", "3", "--again", "1"]) == 0
    assert "'compositions': 3" in capsys.readouterr().out
    assert invariance.main([*words, "0"]) == 1
    assert "'compositions': 0" in capsys.readouterr().out
