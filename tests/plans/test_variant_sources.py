"""Sources of GEMM kernels, generated from the rows of variants.inc."""

import importlib.util
import re

import pytest
from c_programs import ROOT
from plan_cases import rows_of

spec = importlib.util.spec_from_file_location("rows", ROOT / "csrc/cuda/gemm/rows.py")
rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rows)
TABLE = rows.TABLE.read_text()
NAMES = [row[0] for kind in ("GEMM", "BACK") for row in rows_of(kind, kind)]


@pytest.mark.parametrize("together", [False, True])
def test_every_row_has_a_launcher_and_an_entry(together):
    texts = rows.sources(rows.rows(TABLE), together)
    table = texts.pop("cuda/gemm/launchers.c")
    defined = re.findall(r"^extern \"C\" moelora_status (\w+)\($", "".join(texts.values()), re.M)
    plain = [name for name in defined if "_saving_" not in name]
    assert sorted(plain) == sorted(f"moelora_cuda_{name}" for name in NAMES)
    saving = {row[0] for row in rows_of("SAVING", "gemm")}
    saving |= {row[0] for row in rows_of("SAVING_BF16", "gemm") if row[1] == "BF16"}
    assert saving < set(NAMES)
    native = {r["name"] for r in rows.rows(TABLE) if (r["role"], r["format"]) == ("GEMM", "NATIVE")}
    assert len(defined) - len(plain) == len(saving | native) > len(saving) > 0
    assert sorted(re.findall(r"\] = (\w+),$", table, re.M)) == sorted(defined)


def test_sources_are_of_few_rows_and_one_folder_per_family():
    for path, text in rows.sources(rows.rows(TABLE)).items():
        names = re.findall(r"moelora_status (\w+)\($", text, re.M)
        family = path.split("/")[2].removesuffix(".c")
        assert all(name.endswith(f"_{family}") for name in names)
        assert len(names) <= 5
    together = rows.sources(rows.rows(TABLE, "_bf16_"), together=True)
    kinds = {re.sub(r"\d+\.cu", "", path) for path in together}
    assert len(kinds) == 2 * 3 + 1, "of each family gemm, saving and back, where that is fast"


def test_hopper_sources_include_one_main_loop():
    texts = rows.sources(rows.rows(TABLE))
    hopper = {path: text for path, text in texts.items() if "/sm90/" in path}
    include = re.compile(r'#include "cuda/gemm/sm90/(\w+).cuh"')
    folder = ROOT / "csrc/cuda/gemm/sm90"
    defines = re.compile(r"main_loop\(\w+ \(?&")
    loops = {p.stem for p in folder.glob("*.cuh") if defines.search(p.read_text())}
    assert {name for text in hopper.values() for name in include.findall(text)} > loops

    def closure(text, known=()):
        for name in include.findall(text):
            if name not in known:
                known = closure((folder / f"{name}.cuh").read_text(), (*known, name))
        return known

    for path, text in hopper.items():
        assert len(loops.intersection(closure(text))) == 1, path


def test_every_format_of_a_whole_layer_has_one_source():
    formats = {row[2] for row in rows_of("DECODE", "decode")}
    texts = rows.decode_sources(TABLE)
    assert texts.keys() == {f"cuda/decode/decode_{name.lower()}.cu" for name in formats}
    for path, text in texts.items():
        (name,) = re.findall(r"decode::launch_(\w+)\(", text)
        assert f"launch_tiles<MOELORA_KERNEL_{name}>" in text and name.lower() in path


def test_files_that_stay_equal_keep_their_time(tmp_path):
    first = rows.write(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in first}
    assert rows.write(tmp_path) == first
    assert times == {path: path.stat().st_mtime_ns for path in first}
    one = rows.write(tmp_path, "gemm_bf16_16x128x64_sm80")
    assert {*tmp_path.rglob("*.cu"), *tmp_path.rglob("*.c")} == set(one)
