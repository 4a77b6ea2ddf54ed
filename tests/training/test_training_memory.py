"""Training memory: sizes of known models. Its tables in docs: tests/project/test_docs.py."""

import pytest

from benchmarks import training_memory

BILLIONS = {"gpt-oss-20b": 20.9, "Qwen3-30B-A3B": 30.5, "GLM-4.5-Air": 106.9, "gpt-oss-120b": 116.8}


@pytest.mark.parametrize("model", training_memory.MODELS, ids=lambda model: model.name)
def test_parameters_are_those_that_are_published(model):
    total = (model.expert_parameters + model.other_parameters) / 1e9
    assert total == pytest.approx(BILLIONS[model.name], abs=0.06)


def test_cards():
    assert training_memory.fits(22e9) == "24" and training_memory.fits(23e9) == "80"
    assert training_memory.fits(140e9) == "more"
