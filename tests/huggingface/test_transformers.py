"""Adapters of each row by `adapter_names` and `use_adapters`, and what is refused."""

import copy

import pytest
import torch
from hf_models import (
    MODELS,
    PLACES,
    ROWS,
    make_model,
    save_adapter,
    save_adapters,
    tokens,
    transformers,
    with_peft,
)
from small_models import config

import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", MODELS)
def test_adapter_names(config, place, tmp_path):
    """PEFT's argument, for one pass and for generate."""
    model = make_model(config, place[1], place[0])
    ids = tokens(length=4, device=model.device)
    folders = save_adapters(model, tmp_path)
    other = copy.deepcopy(model)
    other.set_experts_implementation("moelora")
    moelora_hf.load_adapters(model, folders.values())
    names = [row or "__base__" for row in ROWS]
    base = model(ids).logits
    with moelora_hf.use_adapters(model, ROWS):
        wanted = model(ids).logits
        texts = model.generate(ids, max_new_tokens=5, do_sample=False)
        # An inner choice goes before an outer one, which then continues.
        assert torch.equal(model(ids, adapter_names=["__base__"] * 5).logits, base)
        assert torch.equal(model(ids).logits, wanted)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded).logits, wanted)
        for without in (other, copy.deepcopy(model)):
            assert torch.equal(without(ids).logits, base), "adapters are those of one model"
    assert not torch.equal(wanted, base)
    assert torch.equal(model(ids, adapter_names=names).logits, wanted)
    assert torch.equal(model(ids, adapter_names=ROWS).logits, wanted)
    options = {"adapter_names": names, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), texts)
    with moelora_hf.use_adapters(model, ROWS, expand=3):
        beams = model.generate(ids, num_beams=3, num_return_sequences=2, max_new_tokens=5)
    config = transformers.GenerationConfig(num_beams=3, max_new_tokens=5)
    got = model.generate(ids, adapter_names=names, generation_config=config, num_return_sequences=2)
    assert torch.equal(got, beams)
    # Nothing stays behind, neither after success nor after failure.
    assert torch.equal(model(ids).logits, base)
    with pytest.raises(ValueError, match="names 1 rows, the model was called with 5"):
        model(ids, adapter_names=["a"])
    with pytest.raises((AttributeError, TypeError)):
        model(ids, adapter_names=names, position_ids="of a wrong type")
    assert torch.equal(model(ids).logits, base)
    with pytest.raises(KeyError, match="no adapter 'd' is loaded"):
        model(ids, adapter_names=["d"] * 5)
    moelora_hf.unload_adapters(model)
    with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
        model.generate(ids, **options)


def test_misuse(tmp_path):
    model = make_model("mixtral")
    folder = save_adapter(model, tmp_path / "a", 0)
    with pytest.raises(RuntimeError, match="has no adapters; call load_adapters first"):
        with moelora_hf.use_adapters(model, ["a"]):
            pass
    two = {"adapters": {"a": folder, "b": folder}}
    for wrong, why in (
        ({"model": with_peft(model, folder)}, "is wrapped by PEFT"),
        ({"adapters": str(folder)}, "wanted a mapping or a list of folders"),
        ({"adapters": [folder, folder]}, r"called \['a', 'a'\], two the same"),
        ({"adapters": {"__base__": folder}}, "name is '__base__', which stands for no adapter"),
        ({**two, "max_loras": 1}, "2 adapters do not fit into max_loras=1; pass host= for"),
        *(({"max_loras": n}, f"loras is {n!r}, wanted an integer >= 1") for n in (0, "8", True)),
        ({"adapters": None}, "adapters is 'None', wanted a mapping or a list of folders"),
        ({"adapters": [None]}, "adapters has None, wanted folders, or ids of the Hub"),
        ({"adapters": {"a": 3}}, "adapters has 3, wanted folders, or ids of the Hub"),
        ({"targets": []}, r'targets is \[\], wanted "all" or a list of names'),
        ({"targets": "q_proj"}, "targets is 'q_proj', wanted \"all\" or a list of names"),
        ({"targets": 3}, 'targets is 3, wanted "all" or a list of names'),
        ({"layout": 3}, "layout is 3, wanted one of"),
    ):
        with pytest.raises(ValueError, match=why):
            moelora_hf.load_adapters(**{"model": model, "adapters": {"a": folder}, **wrong})
    moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(RuntimeError, match="the model has a pool already"):
        moelora_hf.load_adapters(model, {"a": folder})
    with pytest.raises(ValueError, match="names is the string 'a'"):
        with moelora_hf.use_adapters(model, "a"):
            pass
    for wrong in (0, "2", True, 1.5):
        with pytest.raises(ValueError, match=f"expand is {wrong!r}, wanted an integer >= 1"):
            with moelora_hf.use_adapters(model, ["a"], expand=wrong):
                pass
    with pytest.raises(ValueError, match="names is 3, wanted a list of names"):
        model(tokens(rows=1), adapter_names=3)
    with pytest.raises(ValueError, match="names 1 rows, the model was called with 2"):
        with moelora_hf.use_adapters(model, ["a"]):
            model(tokens(rows=2))
    with pytest.raises(RuntimeError, match="call the model that was given to use_adapters"):
        with moelora_hf.use_adapters(model, ["a"]):
            model.model(tokens(rows=1))
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="experts_implementation='eager', which knows no"):
        with moelora_hf.use_adapters(model, ["a"]):
            pass
    odd = transformers.AutoModelForCausalLM.from_config(config("mixtral", hidden_act="gelu"))
    with pytest.raises(NotImplementedError, match="activation of its gate of MixtralExperts"):
        moelora_hf.load_adapters(odd, {"a": folder})
