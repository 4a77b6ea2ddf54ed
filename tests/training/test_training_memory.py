"""benchmarks.training_memory: sizes of known models, and the tables in docs."""

from pathlib import Path

import pytest

from benchmarks import training_memory

DOCS = Path(__file__).resolve().parents[2] / "docs"
BILLIONS = {"gpt-oss-20b": 20.9, "Qwen3-30B-A3B": 30.5, "GLM-4.5-Air": 106.9, "gpt-oss-120b": 116.8}


@pytest.mark.parametrize("model", training_memory.MODELS, ids=lambda model: model.name)
def test_parameters_are_those_that_are_published(model):
    total = (model.expert_parameters + model.other_parameters) / 1e9
    assert total == pytest.approx(BILLIONS[model.name], abs=0.06)


def test_cards():
    assert training_memory.fits(22e9) == "24" and training_memory.fits(23e9) == "80"
    assert training_memory.fits(140e9) == "more"


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [
        ("training.md", "training-memory", training_memory.table),
        ("several-gpus.md", "several-gpus", training_memory.parallel_table),
    ],
)
def test_pages_have_the_tables(page, name, table):
    found = (DOCS / page).read_text().split(f"<!-- {name} -->\n")[1]
    assert found.split(f"\n<!-- /{name}")[0] == table(), "python -m benchmarks.training_memory"
