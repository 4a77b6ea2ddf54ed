"""What changes in PEFT after `attach`: the experts serve what PEFT would, or refuse."""

import copy

import pytest
import torch
from covering import extent
from hf_models import (
    make_model,
    oracle,
    peft,
    save_adapter,
    save_adapters,
    tokens,
    transformers,
    with_peft,
)
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from small_models import SIZES
from threads import run_threads

import moelora.integrations.peft as moelora_peft
from moelora.integrations.peft.experts import AttachedExperts

pytestmark = pytest.mark.usefixtures("no_grad")

# PEFT's hotswap takes every key that contains the name for one of that adapter.
NAMES = ["first", "first", "__base__", "second", "second"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Adapters of one rank and scaling, of another scaling, and of more rank."""
    model = make_model("mixtral")
    options = {
        "first": {},
        "second": {},
        "scaled": {"lora_alpha": 2},
        "large": {"r": 8},
        "attention": {"target_modules": ["o_proj"], "target_parameters": None},
    }
    return save_adapters(model, tmp_path_factory.mktemp("adapters"), options)


def first_of(folders):
    model = make_model("mixtral")
    return peft.PeftModel.from_pretrained(model, folders["first"], adapter_name="first").eval()


@pytest.fixture
def model(folders):
    """Attached, with two adapters, both of which have been used."""
    model = first_of(folders)
    model.load_adapter(folders["second"], adapter_name="second")
    moelora_peft.attach(model, max_rank=8)
    with torch.no_grad():
        model(tokens(), adapter_names=NAMES)
    return model


@torch.no_grad()
def plain(model, name):
    """What PEFT computes by itself with one adapter, and what attached experts do."""
    alone = copy.deepcopy(model)
    moelora_peft.detach(alone)
    alone.get_base_model().set_experts_implementation("eager")
    alone.set_adapter(name)
    model.set_adapter(name)
    return alone(tokens()).logits, model(tokens()).logits


@torch.no_grad()
def assert_serves(model, folders, **names):
    """Rows of a mixed batch, and the active adapter, are those of the folders."""
    wanted = oracle(
        make_model("mixtral"), {k: folders[v] for k, v in names.items()}, NAMES, tokens()
    )
    got = model(tokens(), adapter_names=NAMES).logits
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
    for name in names:
        own, attached = plain(model, name)
        torch.testing.assert_close(attached, own, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(attached[NAMES.index(name)], wanted[NAMES.index(name)])


@pytest.mark.parametrize("other", ["second", "scaled", "large"])
def test_an_adapter_is_deleted_and_loaded_anew(model, folders, other):
    assert_serves(model, folders, first="first", second="second")
    model.set_adapter("second")
    model.delete_adapter("first")
    model.load_adapter(folders[other], adapter_name="first")
    assert_serves(model, folders, first=other, second="second")


def test_a_name_loses_and_gains_experts(model, folders):
    model.set_adapter("second")
    for other in ("attention", "scaled"):
        model.delete_adapter("first")
        model.load_adapter(folders[other], adapter_name="first")
        assert_serves(model, folders, first=other, second="second")
    model.delete_adapter("first")
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(tokens(), adapter_names=NAMES)
    new = peft.LoraConfig(target_parameters=model.peft_config["second"].target_parameters)
    model.add_adapter("first", new)  # untrained, and of no folder
    torch.testing.assert_close(*plain(model, "first"), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("other", ["second", "scaled", "large"])
def test_hotswap(model, folders, other, inference):
    for new in (other, "first", other):
        model.set_adapter("first")
        with torch.inference_mode(inference):
            hotswap_adapter(model, folders[new], adapter_name="first", torch_device="cpu")
        if new == "first" and other == "large":
            return  # PEFT scrambles the factors of experts where it pads them
        assert_serves(model, folders, first=new, second="second")


def test_hotswap_with_scalings_that_are_tensors(folders):
    model = first_of(folders)
    with pytest.raises(AttributeError):  # until PEFT can do it for experts, by hand
        prepare_model_for_compiled_hotswap(model)
    for module in model.modules():
        if hasattr(module, "parameter_name"):
            module.scaling["first"] = torch.tensor(module.scaling["first"])
    moelora_peft.attach(model)
    for other in ("scaled", "second"):
        own, attached = plain(model, "first")
        torch.testing.assert_close(attached, own, rtol=2e-4, atol=2e-4)
        hotswap_adapter(model, folders[other], adapter_name="first", torch_device="cpu")
        assert isinstance(module_of(model).scaling["first"], torch.Tensor)
        own, swapped = plain(model, "first")
        torch.testing.assert_close(swapped, own, rtol=2e-4, atol=2e-4)
        assert not torch.allclose(swapped, attached, atol=1e-2)


def module_of(model, layer=1):
    return model.get_base_model().model.layers[layer].mlp.experts


def assign(weight):
    with torch.inference_mode(False):
        weight.data = weight.detach() * -3


def held(weight):
    data = weight.data
    yield
    data.mul_(-3)


def assigned(weight):
    data = weight.detach() * 2
    weight.data = data
    yield
    data.mul_(-2)


WRITES = {
    "in place": lambda w: w.mul_(-3),
    "of a view": lambda w: w[:3].mul_(-3),
    "through data": lambda w: w.data.mul_(-3),
    "a view of data": lambda w: w.data[:3].mul_(-3),
    "through detach": lambda w: w.detach().mul_(-3),
    "to data": assign,
    "set": lambda w: w.set_(w.detach().clone() * -3),
    "through data taken earlier": held,
    "through what was assigned to data": assigned,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes(model, write, side, inference):
    """To one factor of the last layer alone, more than once."""
    _, before = plain(model, "first")
    for _ in range(2):
        weight = getattr(module_of(model), side)["first"].weight
        with torch.inference_mode(inference), torch.no_grad():
            steps = write(weight)
        if hasattr(steps, "__next__"):
            next(steps)
            plain(model, "first")
            next(steps, None)
        own, after = plain(model, "first")
        torch.testing.assert_close(after, own, rtol=2e-4, atol=2e-4)
        assert not torch.allclose(after, before, atol=1e-3)
        before = after


def test_scalings(model):
    for change in (
        lambda m: m.set_scale("first", 3.0),
        lambda m: m.scale_layer(0.5),
        lambda m: m.unscale_layer(),
    ):
        _, before = plain(model, "first")
        change(module_of(model))
        own, after = plain(model, "first")
        torch.testing.assert_close(after, own, rtol=2e-4, atol=2e-4)
        assert not torch.allclose(after, before, atol=1e-4)


def test_loaded_in_inference_mode(folders):
    with torch.inference_mode():
        model = first_of(folders)
        moelora_peft.attach(model)
        model(tokens())
        hotswap_adapter(model, folders["second"], adapter_name="first", torch_device="cpu")
        got = model(tokens()).logits
        wanted = with_peft(make_model("mixtral"), folders["second"])(tokens()).logits
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_nothing_is_copied_without_a_change(model, monkeypatch):
    copies = []
    copy = AttachedExperts.copy
    spy = lambda self, name: copies.append(name) or copy(self, name)  # noqa: E731
    monkeypatch.setattr(AttachedExperts, "copy", spy)
    for _ in range(3):
        model(tokens(), adapter_names=NAMES)
        for parameter in model.parameters():  # reading is no change
            assert parameter.data.sum().isfinite()
    assert copies == []
    module_of(model).lora_A["first"].weight.data.mul_(2)
    model(tokens(), adapter_names=NAMES)
    model(tokens(), adapter_names=NAMES)
    assert copies == ["first"]


def test_threads(model):
    """The active adapter from several threads, in batches of different sizes."""
    sizes = [(1, 3), (2, 7), (5, 2)]
    batches = [tokens(*size) for size in sizes]
    model.set_adapter("first")
    wanted = [model(ids).logits for ids in batches]

    def serve(thread):
        wrong = 0
        for n in range(extent(nightly=300, ci=90)):
            which = (thread + n) % 3
            wrong += not torch.equal(model(batches[which]).logits, wanted[which])
        return wrong

    assert run_threads(serve, 3) == [0] * 3


def test_moved_in_inference_mode(model, folders):
    """Data of another kind and dtype, and what detach leaves behind."""
    with torch.inference_mode():
        model.to(torch.float64).to(torch.float32)
        assert_serves(model, folders, first="first", second="second")
    assert_serves(model, folders, first="first", second="second")
    moelora_peft.detach(model)
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}


# ---- tokens that do not reach the experts row by row ----


def ernie():
    return transformers.models.ernie4_5_vl_moe.Ernie4_5_VLMoeTextConfig(
        **SIZES,
        intermediate_size=40,
        moe_intermediate_size=[24, 16],
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        mlp_layer_types=["sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )


def test_image_tokens_spread_unevenly(tmp_path):
    """Ernie-4.5-VL has other experts for image tokens; what reaches either is no whole row."""
    torch.manual_seed(0)
    model = transformers.models.ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel(ernie()).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name or ".gate.weight" in name:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    parameters = ("gate_up_proj", "down_proj")
    targets = [f"{kind}_moe.experts.{p}" for kind in ("text", "vision") for p in parameters]
    folder = save_adapter(model, tmp_path / "first", 0, target_parameters=targets)
    ids = tokens(2, 8)
    images = torch.zeros(2, 8, dtype=torch.int32)
    images[0, 1:6] = 1
    options = {"moe_mm_token_type_ids": images}
    base = model(ids, **options).last_hidden_state
    wanted = with_peft(model, folder)(ids, **options).last_hidden_state
    model = peft.PeftModel.from_pretrained(model, folder, adapter_name="first").eval()
    moelora_peft.attach(model)

    def run(names, **options):
        return model(ids, adapter_names=names, **options).last_hidden_state

    torch.testing.assert_close(run(["first", "first"], **options), wanted, rtol=2e-4, atol=2e-4)
    base_rows = run(["__base__"] * 2, **options)
    torch.testing.assert_close(base_rows, base, rtol=2e-4, atol=2e-4)
    assert (wanted - base).abs().max() > 0.1
    with pytest.raises(RuntimeError, match=r"11 tokens of \(2, 8\) in the batch reached layers"):
        run(["first", "__base__"], **options)
