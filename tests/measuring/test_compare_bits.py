"""Digests of two builds: what differs is found and named, over a grid that leaves nothing out."""

import json
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


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose package runs some more lines at the end; its folder."""

    def make(lines):
        folder = tmp_path / "checkout" / "moelora"
        folder.mkdir(parents=True)
        for path in (ROOT / "moelora").iterdir():
            (folder / path.name).symlink_to(path)
        (folder / "__init__.py").unlink()
        text = (ROOT / "moelora/__init__.py").read_text()
        (folder / "__init__.py").write_text(f"{text}\n{lines}\n")
        return folder.parent

    return make


def run(*words, only=PACKING):
    return bits.main([*map(str, words), "--device", "cpu", "--only", only])


PACK_BY_HALF = """
_pack = prepack_weights
def prepack_weights(w):
    packed = _pack(w)
    packed.data.view(-1)[:3] += 0.5
    packed.data.view(-1)[3] = float("nan")
    return packed
"""


def test_a_build_has_its_own_bits(capsys):
    """Of every family a few groups, the same module twice."""
    families = "edges plain,edges random 3,tops top_k=2 f16,gemms small bf16,alignments 40x3"
    words = f"before={MODULE}", f"after={MODULE}"
    assert run(*words, only=f"{families},lists 13x5,{PACKING}") == 0
    out = capsys.readouterr().out
    assert "after: " in out and "calls as before\n" in out
    assert not any(word in out for word in ("differ", "only here", "neither", "fail"))


def test_what_differs_is_named(checkout, capsys):
    assert run(f"before={MODULE}", f"after={checkout(PACK_BY_HALF)}") == 1
    first, second, *_, last = capsys.readouterr().out.splitlines()
    sizes = "4 of 12288 elements, by up to 0.5, 1 not finite"
    assert first == f"after differs: {PACKING}: pack, rows: output: {sizes}"
    assert second == f"after differs: {PACKING}: pack, gaps: output: {sizes}"
    assert last == "after: 0 calls as before, 2 differ (packing 2)"


@pytest.mark.slow
def test_a_file_in_the_place_of_a_build(checkout, tmp_path, capsys):
    out = tmp_path / "bits.json"
    assert run("--out", out, f"now={MODULE}") == 0
    content = json.loads(out.read_text())
    assert content["meta"]["digests_of"] == "cpu"
    assert [row["call"] for row in content["cases"]] == ["pack, rows", "pack, gaps"]
    capsys.readouterr()
    assert run(f"before={out}", f"after={MODULE}", only="packing small") == 0
    assert "after: 2 calls as before, 2 groups not in a file" in capsys.readouterr().out
    assert run(f"before={out}", f"after={checkout(PACK_BY_HALF)}") == 1
    assert f"{PACKING}: pack, rows: other bits in output" in capsys.readouterr().out
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
