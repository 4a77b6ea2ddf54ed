"""Digests of two builds: what differs is found and named, over a grid that leaves nothing out."""

import json
import re
from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, EDGE_CASES, SHARING
from glue_cases import op_calls
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import grid
from benchmarks.compare import bits
from benchmarks.compare.processes import ROOT
from benchmarks.grid import adapters, alignment, calls, layers
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
def test_another_kernel_has_other_bits(capsys):
    if _C.usable().count("gemm_f32_scalar") == sum("f32" in name for name in _C.usable()):
        pytest.skip("this CPU has one kernel")
    words = f"a={MODULE}", f"b={MODULE},MOELORA_FORCE_VARIANT=gemm_f32_scalar"
    assert run(*words, only="edges plain f32") == 1
    out = capsys.readouterr().out
    assert "b differs: edges plain f32: layer: output: " in out
    assert "layer, gemm_f32" not in out, "forced, both run the same kernel"


@pytest.mark.slow
def test_what_one_build_lacks(checkout, capsys):
    """Gained by the second build it is no difference; lost it is."""
    less = checkout("del moe_sorting")
    alone = "alignments 1x1x1x1"
    assert run(f"before={less}", f"after={MODULE}", only=alone) == 0
    assert "only here (alignments 14)" in capsys.readouterr().out
    assert run(f"before={MODULE}", f"after={less}", only=alone) == 1
    out = capsys.readouterr().out
    assert "sorting, block 16, map: no longer taken: AttributeError: " in out
    assert "14 differ" in out


@pytest.mark.slow
def test_failures_are_compared(checkout, capsys):
    fails = checkout("def prepack_weights(w):\n    raise RuntimeError('no memory')")
    assert run(f"before={MODULE}", f"after={fails}") == 1
    assert "pack, rows: after RuntimeError: no memory" in capsys.readouterr().out
    assert run(f"before={fails}", f"after={fails}") == 0
    assert "2 calls as before, 2 of them fail" in capsys.readouterr().out


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


def test_memory_that_nobody_writes_has_known_bytes(checkout, tmp_path):
    """Or two builds could agree by luck, and one differ from itself."""
    lines = "def prepack_weights(w):\n    return PackedWeights(w.new_empty(w.numel()))"
    out = tmp_path / "bits.json"
    assert run("--out", out, f"now={checkout(lines)}") == 0
    poison = torch.full((4 * 12288,), bits.POISON, dtype=torch.uint8).view(torch.float32)
    found = [row["digests"]["output"] for row in json.loads(out.read_text())["cases"]]
    assert found == [bits.digest(poison)] * 2


@pytest.mark.slow
def test_a_budget_ends_it_and_families_take_turns(capsys):
    assert run("--budget", "0", f"a={MODULE}", f"b={MODULE}", only="") == 0
    assert "1 of " in capsys.readouterr().out
    for device in ("cpu", "cuda"):
        families = [name for name, family in grid.FAMILIES.items() if next(family(device), None)]
        first = list(grid.groups(device))[: len(families)]
        assert [name.split()[0] for name in first] == families
        assert set(grid.FAMILIES) - set(families) <= {"gradients"}  # CUDA has none yet


@pytest.mark.parametrize(
    "words, message",
    [
        (["a=nowhere.so"], "is not NAME=MODULE"),
        ([f"a={MODULE}", f"a={MODULE}"], "different names"),
        ([f"a={MODULE}", f"b={MODULE}", "--out", "x.json"], "for one build"),
        (["--only", "nothing"], "no group begins with nothing"),
    ],
)
def test_wrong_words_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bits.main([*words, "--device", "cpu"])
    assert message in f"{stopped.value} {capsys.readouterr().err}"


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
        role, dtypes = kind.split("_")[0].lower(), ("bf16", "f16")
        whole = role in ("gemm", "decode", "back")
        dtypes = ("i32",) if role == "sort" else dtypes
        names |= {stem} if whole else {f"{role}_{dtype}_{stem}" for dtype in dtypes}
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


def test_the_grid_has_every_kind_of_problem():
    tables = (layers.LAYOUTS, layers.TOPS, layers.GEMMS, adapters.LISTED, adapters.STAGED)
    specs = [spec for table in (*tables, EDGE_CASES) for spec in table.values()]
    assert {spec.activation for spec in specs} == set(ACTIVATIONS)
    assert {spec.top_k for spec in specs} >= set(range(1, 10))
    assert {spec.sharing for spec in specs} == set(SHARING)
    assert {(spec.slices, spec.bias, spec.remote > 0) for spec in specs} >= {
        *((1, True, True), (2, True, False), (1, False, False), (2, False, True))
    }
    assert any(spec.weight_on_input for spec in specs)
    assert {(max(spec.ranks) - 1) // 16 for spec in specs} >= {0, 1, 2, 3, 7, 15}
    assert {1, 8192} <= set(layers.TOKENS["cuda"])
    items = {(tokens, tokens * top_k) for tokens, top_k, *_ in alignment.SIZES}
    for bound in (64, 16384):  # of a sort of tokens, and of one of rows
        assert {rows <= bound for _, rows in items} == {tokens <= bound for tokens, _ in items}
        assert bound in {rows for _, rows in items}
    keys = {experts * (adapters + 1) for _, _, experts, adapters in alignment.SIZES}
    assert {n <= 7680 for n in keys} == {True, False}
    assert {1, 256} <= set(alignment.BLOCKS)
