"""Adapters of attention, shared experts, dense layers, routers, embeddings and experts together:
mixed batches through `load_adapters` against weights that adapters are merged into."""

import copy

import pytest
import torch
from hf_models import PLACES, assert_logits, tokens
from whole_models import (
    MODELS,
    ROWS,
    make_whole_model,
    wanted_logits,
    write_adapters,
)

import moelora.integrations.transformers as moelora_hf

BASE = ["__base__"] * len(ROWS)


def assert_close(got, wanted, naive):
    """In float32 by each row's norm: adapters of everything make some logits large."""
    if got.dtype != torch.float32:
        assert_logits(got, wanted, naive)
        return
    off = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert (off <= 1e-4).all(), off


@torch.no_grad()
@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.__name__)
def test_mixed_batch(config, place, tmp_path):
    model = make_whole_model(config, place[1], place[0])
    ids = tokens(length=9, device=model.device)
    folders = write_adapters(model, tmp_path)
    exact = copy.deepcopy(model).float()
    wanted = wanted_logits(exact, folders, ROWS, ids)
    naive = wanted_logits(model, folders, ROWS, ids)
    base = exact(ids).logits
    pool = moelora_hf.load_adapters(model, folders)
    assert pool.names() == list(folders)
    got = model(ids, adapter_names=ROWS).logits
    for i, row in enumerate(ROWS):
        difference = (wanted[i] - base[i]).abs().max()
        assert (difference > 0.1) == (row is not None), "an adapter must be seen in the logits"
    assert_close(got, wanted, naive)
    assert torch.equal(got[1], model(ids).logits[1]), "base rows keep their bits"
    assert torch.equal(model(ids, adapter_names=BASE).logits, model(ids).logits)
