"""The table of quantizers in docs/weight-formats.md says what the reader does, and no more."""

import sys
from pathlib import Path

import pytest
from hf_models import transformers  # noqa: F401  skips where it is not installed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quantizers"))
import table

from moelora.integrations.transformers import scheme as schemes
from moelora.integrations.transformers.schemes import scheme_of

RESULTS = table.results()
ROWS = [(tool, scheme) for tool, rows in RESULTS.items() for scheme in rows]


def test_the_page_has_the_table_of_the_results():
    page = table.PAGE.read_text()
    assert table.BETWEEN.search(page)
    assert table.filled(page) == page, "python tests/quantizers/table.py --write"


def test_no_folder_that_loads_is_wrong():
    results = [
        r for rows in RESULTS.values() for row in rows.values() for r in row["folders"].values()
    ]
    assert results
    known = "right", "experts as they were", "refused: ", "dequantized: ", "not made: "
    assert not [r for r in results if not r.startswith(known)]


@pytest.mark.parametrize(("tool", "scheme"), ROWS)
def test_a_cell_is_what_the_settings_of_that_folder_give(tool, scheme):
    """Without the folder: its settings and the tensors of one projection are in the results."""
    row = RESULTS[tool][scheme]
    if "layer" not in row:
        assert all(result.startswith("not made") for result in row["folders"].values())
        return
    found = scheme_of(row["settings"], row["layer"], row["parts"])
    for result in row["folders"].values():
        if result.startswith(("refused: ", "dequantized: ")) and found.make is None:
            assert f"experts are {found.name}; {found.refusal}" in result
            if result.startswith("dequantized: "):
                assert found.dequantize_weight is not schemes.unread
        elif result == "right":
            assert found.make is not None


def test_vllm_methods_that_moelora_takes_over_are_on_the_page():
    page = table.PAGE.read_text()
    for method in filter(None, table.VLLM.values()):
        assert f"`{method}`" in page
