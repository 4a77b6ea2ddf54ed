"""Weight formats: one table, csrc/formats.inc, says what each is, to C, to CUDA and to Python."""

import pytest
import torch
from cases import Spec
from quantized_cases import ALL_FORMATS, build

from moelora.operators.formats import FORMATS, code_of


def test_codes_stay_as_state_dicts_hold_them():
    names = ["NATIVE", "MXFP4", "INT4", "INT4_G32", "INT4_ZP", "INT4_ZP_G32"]
    names += ["FP8", "FP8_G64", "FP8_ROWS", "NVFP4", "NF4", "BNB_FP4"]
    assert [f.name for f in FORMATS[: len(names)]] == names


@pytest.mark.parametrize("code", range(1, len(FORMATS)), ids=lambda code: FORMATS[code].name)
def test_a_tile_holds_its_values_and_scales(code):
    f = FORMATS[code]
    values = 64 * f.tile_columns * f.bits // 8
    scales = 64 // f.group_rows * (f.tile_columns // f.group_columns)
    assert f.tile_bytes % 16 == 0, "copies are of 16 bytes"
    assert f.tile_bytes >= values + scales * (1 + f.has_zeros)


@pytest.mark.parametrize("code", range(1, len(FORMATS)), ids=lambda code: FORMATS[code].name)
def test_every_format_is_one_of_the_cases(code):
    """A format without a case is a kernel that no test runs."""
    spec = Spec(tokens=3, hidden=128, inter=128)
    layouts = [build(spec, f, torch.bfloat16).w13.layout[0] for f in ALL_FORMATS.values()]
    assert code in layouts


@pytest.mark.parametrize("code", range(1, len(FORMATS)), ids=lambda code: FORMATS[code].name)
def test_a_format_is_found_by_what_it_is(code):
    f = FORMATS[code]
    assert code_of(f.kernel, f.group_columns, f.has_zeros, f.row_scales) == code


def test_what_no_format_is():
    with pytest.raises(ValueError, match="no format of mxfp4 has zero points and a scale for 32"):
        code_of("mxfp4", 32, True, False)
