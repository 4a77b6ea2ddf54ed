"""The files of an adapter: shards, torch's, and weights of the model beside the factors."""

import json

import pytest
import torch
from adapter_cases import CONFIG, rand, write
from dialects import shards
from linear_cases import EXPERTS, HEAD, LINEARS, PREFIX, K, Q, R, assert_pair, pair, read
from safetensors.torch import save_file

from moelora.adapters import load, peek
from moelora.adapters.weights import open_weights

# ---- weights beside factors ----


def embeddings(weight):
    """PEFT saves the weights of embeddings that have factors."""
    state, _ = pair(HEAD, K, 20)
    return state | {f"{PREFIX}lm_head.base_layer.weight": weight}


def test_saved_weights_must_be_those_of_the_model():
    own = rand(20, K).bfloat16()
    for saved in (own, own.float()):
        assert read(embeddings(saved), own={HEAD: own}.get).linears[HEAD]
    assert read(embeddings(own), own={HEAD: own.float()}.get).linears[HEAD]
    with pytest.raises(ValueError, match=r"trained with another weight of lm_head"):
        read(embeddings(own + 1), own={HEAD: own}.get)
    with pytest.raises(ValueError, match=r"is not at hand to compare.*save_embedding_layers=False"):
        read(embeddings(own))
    with pytest.raises(ValueError, match=r"with a weight \(22, 8\), that of lm_head is \(20, 8\)"):
        read(embeddings(rand(22, K)), own={HEAD: own}.get)
    state, _ = pair(Q, K, 10)
    table = {f"{PREFIX}model.embed_tokens.weight": own}
    assert read(state | table, own={"model.embed_tokens": own}.get).linears[Q]


# ---- files ----


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
@pytest.mark.parametrize("with_index", [False, True])
def test_shards(tmp_path, ending, with_index):
    state, q = pair(Q, K, 10)
    folder = write(tmp_path, state)
    shards(folder, ending, with_index)
    assert_pair(load(folder, None, EXPERTS, LINEARS).linears[Q], q)
    assert peek(folder, EXPERTS, LINEARS).linear_ranks == {Q: R}
    (folder / f"adapter_model-00002-of-00002{ending}").unlink()
    with pytest.raises(ValueError, match=r"has (no file|the shards) .*adapter_model-0000"):
        load(folder, None, EXPERTS, LINEARS)


SECOND = "adapter_model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: "{", "is not JSON"),
        (lambda index: {"a": "../other"}, "names '../other', wanted a file of its folder"),
        (lambda index: {"a": 3}, "names 3, wanted a file of its folder"),
        (lambda index: {}, "names no files"),
        # as of a shard that was written anew: a factor must not be lost
        (lambda index: index | {"o_proj.lora_A.weight": SECOND}, f"{SECOND} has no .*o_proj.lora"),
    ],
)
def test_an_index_that_leads_elsewhere(tmp_path, change, message):
    folder = write(tmp_path, pair(Q, K, 10)[0])
    index = change(shards(folder, with_index=False))
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (folder / "adapter_model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(folder, None, EXPERTS, LINEARS)


def test_a_key_in_two_shards(tmp_path):
    state, _ = pair(Q, K, 10)
    folder = write(tmp_path, state)
    shards(folder, with_index=False)
    save_file(state, folder / "adapter_model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"lora_A.weight is in .*00002-of.* and in another shard"):
        load(folder, None, EXPERTS, LINEARS)


class Trap:
    """What a pickle may do that tensors do not."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_torch_files_hold_tensors_alone(tmp_path, capsys):
    state, q = pair(Q, K, 10)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    torch.save(state, tmp_path / "adapter_model.bin")
    assert_pair(load(tmp_path, None, EXPERTS, LINEARS).linears[Q], q)
    for content, message in (
        (state | {"trap": Trap()}, r"only tensors: its pickle has GLOBAL __builtin__\.print"),
        ([state], "its pickle has EMPTY_LIST, which no dictionary of tensors has"),
        (next(iter(state.values())), "it holds a tensor, wanted a dictionary of tensors"),
        ({"state_dict": state}, "state_dict is a dict, wanted a tensor"),
    ):
        torch.save(content, tmp_path / "adapter_model.bin")
        with pytest.raises(ValueError, match=message):
            load(tmp_path, None, EXPERTS, LINEARS)
    assert capsys.readouterr().out == ""


def test_torch_files_of_modules(tmp_path):
    """Parameters, views, metadata of state dicts, and other dtypes are read as torch.load does."""
    module = torch.nn.Linear(8, 4)
    module.weight.note = "an attribute"
    state = module.state_dict(keep_vars=True)
    whole = torch.arange(24.0)
    state |= {"view": whole[3:15].view(3, 4).T, "none": whole[:0], "half": whole[:6].half()}
    state |= {"double": whole.double()[1:], "short": whole[:3].short()}
    torch.save(state, tmp_path / "adapter_model.bin")
    with open_weights(tmp_path) as weights:
        assert list(weights) == list(state)
        for key, tensor in state.items():
            assert torch.equal(weights[key].read(), tensor), key
            assert weights[key][:2] == (tuple(tensor.shape), tensor.dtype)
