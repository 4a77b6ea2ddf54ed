"""Gradients of the pairs of expert and adapter that tokens reach, and of no others."""

import pytest
import torch
from checks import freed
from test_backwards import SPARSE

import moelora
from moelora.operators.sparse import set_sparse
from moelora.training import touched_pairs


def test_touched_pairs_of_other_shapes_are_refused():
    ids, mapping = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    for arguments, why in (
        ((ids[:, 0], mapping, 2, 4), r"topk_ids has shape \(3,\), expected \(M, top_k\)"),
        ((ids.float(), mapping, 2, 4), "topk_ids has dtype float32, expected an integer one"),
        ((ids, mapping[:, None], 2, 4), r"mapping has shape \(3, 1\), expected \(3,\)"),
        ((ids, mapping[:1], 2, 4), r"mapping has shape \(1,\), expected \(3,\)"),
        ((ids, mapping, -1, 4), "max_loras is -1, wanted an integer >= 0"),
        ((ids, mapping, 2, -4), "num_experts is -4, wanted an integer >= 0"),
        ((ids, mapping, float("nan"), 4), "max_loras is nan, wanted an integer >= 0"),
        ((ids, mapping, 2, True), "num_experts is True, wanted an integer >= 0"),
        ((ids, mapping.to("meta"), 2, 4), "token_lora_mapping is on meta, expected cpu as topk_i"),
        ((ids, mapping, 2**16, 2**15), "num_experts is 32768, expected at most 2.31 - 1 pairs"),
        ((ids, mapping, 2, 4, ids), r"expert_map has shape \(3, 2\), expected 1 dimension"),
        ((freed(ids), mapping, 2, 4), "topk_ids has elements up to byte 48 of a storage of 0"),
        ((ids, freed(mapping), 2, 4), "token_lora_mapping has elements up to byte 12"),
    ):
        with pytest.raises(ValueError, match=why):
            touched_pairs(*arguments)
    whole = torch.empty(0, dtype=torch.int32)  # as operators have it: no map
    assert touched_pairs(ids, mapping, 2, 4, whole)[0].tolist() == [[0, -1, -1, -1], [-1] * 4]


def test_pairs_of_a_call_that_is_refused():
    """The operator's own message, where torch would broadcast or read address 0."""
    arguments = SPARSE.build().kwargs()
    factors = {name: arguments[name].requires_grad_() for name in ("w2_lora_a", "w2_lora_b")}
    set_sparse(factors.values(), True)
    ids, mapping = arguments["topk_ids"], arguments["token_lora_mapping"]
    for changes, why in (
        ({"topk_ids": freed(ids)}, "topk_ids has elements up to byte"),
        ({"token_lora_mapping": freed(mapping)}, "token_lora_mapping has elements up to byte"),
        ({"token_lora_mapping": mapping[:5]}, "token_lora_mapping.size"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora.fused_experts_lora(**arguments | changes)
