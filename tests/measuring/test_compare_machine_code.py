"""Machine code of two builds, from what cuobjdump prints of them."""

import shutil

import pytest

from benchmarks.compare import machine_code

pytestmark = pytest.mark.skipif(not shutil.which("c++filt"), reason="c++filt is binutils'")

# What it prints of a file is what the file holds.
CUOBJDUMP = '#!/bin/sh\nfor last; do :; done\ncat "$last"\n'
LOAD = "ULDC UR4, c[0x0][0x210]"


def dump(folder, name, kernels, arch="sm_90a"):
    """A file of {mangled name: instructions}."""
    text = f"\tcode for {arch}\n\t.target\t{arch}\n"
    for kernel, code in kernels.items():
        text += f'\t\tFunction : {kernel}\n\t.headerflags @"EF_CUDA_SM90"\n'
        for i, line in enumerate(code):
            text += (
                f"        /*{16 * i:04x}*/                   {line} ;      /* 0x00000a00ff01 */\n"
            )
            text += f"{'':84}/* 0x000ff00000000800 */\n"
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def compare(tmp_path, capsys):
    tool = tmp_path / "cuobjdump"
    tool.write_text(CUOBJDUMP)
    tool.chmod(0o755)

    def run(before, after, *words):
        before, after = dump(tmp_path, "before", before), dump(tmp_path, "after", after)
        words = [f"before={before}", f"after={after}", "--cuobjdump", str(tool), *words]
        status = machine_code.main(words)
        return status, capsys.readouterr().out

    return run


def test_a_build_is_itself(compare):
    code = {"_Z6shrinkv": [LOAD, "EXIT"], "_Z6expandv": ["EXIT"]}
    assert compare(code, code) == (0, "the same: 2\n")


def test_other_offsets_are_no_difference(compare):
    before, after = {"_Z6shrinkv": [LOAD]}, {"_Z6shrinkv": [LOAD.replace("210", "218")]}
    assert compare(before, after) == (0, "only offsets: 1\n")


def test_other_instructions_are_counted(compare):
    before = {"_Z6shrinkv": ["@!P0 FADD R1, R2, R3", "FADD R1, R2, R3", "EXIT"]}
    after = {"_Z6shrinkv": ["@!P0 FMUL R1, R2, R3", "EXIT"]}
    status, said = compare(before, after)
    assert status == 1
    assert "sm_90a shrink: 3 -> 2 instructions, 2 not in both: FADD -2, FMUL +1\n" in said


def test_other_registers_are_a_difference_that_counts_nothing(compare):
    before, after = ({"_Z6shrinkv": [f"FADD R1, R2, {last}"]} for last in ("R3", "R12"))
    said = "sm_90a shrink: 1 -> 1 instructions, 0 not in both\ndiffer: 1\n"
    assert compare(before, after) == (1, said)


def test_anonymous_namespaces_and_renamed_templates_have_partners(compare):
    """Neither the hash of a source in a mangled name nor a new template parameter is a kernel's."""
    hashed = "_ZN41_GLOBAL__N__{}_9_expand_cu_eaa517226expandILi4EEEvNS_6ParamsE"
    before = {hashed.format("5e91f383"): [LOAD, "EXIT"], "_Z6expandILi4EEvv": ["BRA 0x10"]}
    after = {hashed.format("00000000"): [LOAD, "EXIT"], "_Z6expandILi4ELi1EEvv": ["BRA 0x10"]}
    assert compare(before, after) == (0, "the same: 2\n")


def test_kernels_that_come_and_go_are_named(compare):
    before = {"_Z6shrinkILi4EEvv": ["EXIT"], "_Z6resultILi4EEvv": ["FADD R1, R1, R1"]}
    after = {"_Z6expandILi4EEvv": ["NOP", "EXIT"], "_Z6resultILi5EEvv": ["FMUL R1, R1, R1"]}
    status, said = compare(before, after)
    assert status == 1
    assert "sm_90a shrink<4>: only before, 1 instructions\n" in said
    assert "sm_90a expand<4>: only after, 2 instructions\n" in said
    assert said.endswith("only before: 2, only after: 2\n")
