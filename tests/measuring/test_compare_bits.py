"""Digests of two builds: what differs is found and named, over a grid that leaves nothing out."""

import re
from dataclasses import replace

import pytest
import torch
from glue_cases import op_calls
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import grid
from benchmarks.compare import bits
from benchmarks.compare.processes import ROOT
from benchmarks.grid import adapters, calls, layers
from moelora import _C

MODULE = _C.__file__
PACKING = "packing small f32"


PACK_BY_HALF = """
_pack = prepack_weights
def prepack_weights(w):
    packed = _pack(w)
    packed.data.view(-1)[:3] += 0.5
    packed.data.view(-1)[3] = float("nan")
    return packed
"""


@pytest.fixture
def other(tmp_path):
    """A checkout whose package packs other bits; its folder."""
    folder = tmp_path / "checkout" / "moelora"
    folder.mkdir(parents=True)
    for path in (ROOT / "moelora").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "__init__.py").unlink()
    text = (ROOT / "moelora/__init__.py").read_text()
    (folder / "__init__.py").write_text(f"{text}\n{PACK_BY_HALF}")
    return folder.parent


def run(*words, only=PACKING):
    return bits.main([*map(str, words), "--device", "cpu", "--only", only])


def test_a_build_has_its_own_bits_and_others_are_named(tmp_path, other, capsys):
    """A file of digests takes the place of a build."""
    out = tmp_path / "bits.json"
    assert run("--out", out, f"now={MODULE}") == 0
    capsys.readouterr()
    assert run(f"file={out}", f"now={MODULE}") == 0
    assert run(f"now={MODULE}", f"again={MODULE}", f"other={other}") == 1
    same, first, second, _, again, last = capsys.readouterr().out.splitlines()[1:]
    assert (same, again) == ("now: 2 calls as file", "again: 2 calls as now")
    sizes = "4 of 12288 elements, by up to 0.5, 1 not finite"
    assert first == f"other differs: {PACKING}: pack, rows: output: {sizes}"
    assert second == f"other differs: {PACKING}: pack, gaps: output: {sizes}"
    assert last == "other: 0 calls as now, 2 differ (packing 2)"
    with pytest.raises(SystemExit, match="has no digests of cuda, but of cpu"):
        bits.Recorded("before", out, "cuda")


# ---- the grid ----


def test_the_grid_calls_every_operator():
    class Seen(TorchDispatchMode):
        names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func._schema.name.removeprefix("moelora::"))
            return func(*args, **(kwargs or {}))

    worker = bits.Worker("cpu")
    with Seen() as seen:
        for name in (
            *("edges plain f32", "gemms small f32", "listed unaligned f32", "stages unaligned f32"),
            *(PACKING, "quantized halves mxfp4 bf16", "alignments 13x5x16x4", "lists 13x5x16x4"),
            "gradients plain f32",
        ):
            assert worker.run(name)["refused"] == {}
    assert seen.names >= {name for name, _ in op_calls()}


def test_the_grid_runs_every_variant_of_this_cpu():
    worker = bits.Worker("cpu")
    for word in grid.DTYPES["cpu"]:
        assert worker.run(f"edges plain {word}")["refused"] == {}
    assert worker.unmet() == []


def test_the_grid_forces_rows_of_every_role(monkeypatch):
    """All of csrc/cuda/variants.inc, at some number of tokens of some group."""
    table = (ROOT / "csrc/cuda/variants.inc").read_text()
    names = set()
    for kind, stem in re.findall(r"^MOELORA_CUDA_([A-Z_]+)\((\w+), .+\)$", table, re.M):
        role = kind.split("_")[0].lower()
        dtypes = ("i32",) if role == "sort" else ("bf16", "f16")
        names |= {f"{role}_{dtype}_{stem}" for dtype in dtypes}
    assert len(names) > 100
    monkeypatch.setattr(calls._C, "usable", lambda: sorted(names))
    dtypes = grid.DTYPES["cuda"].values()
    kinds = *grid.BASE, *grid.BACK, *grid.AROUND, *grid.DELTA
    assert {name for dtype in dtypes for name in grid.rows("cuda", dtype, *kinds)} == names
    assert grid.rows("cpu", torch.float32, *grid.AROUND) == []

    forced = set()
    for dtype in dtypes:
        p = replace(adapters.MLP, tokens=7, dtype=dtype).build()
        forced |= {how.rpartition(", ")[2] for how, _ in layers.around("cuda", p)}
        others = adapters._forced("cuda", p.spec, adapters.sglang(p), adapters.FORCED[0])
        forced |= {how.rpartition(", ")[2] for how, _ in others}
    assert forced == {name for name in names if not name.startswith((*grid.BASE, *grid.BACK))}
