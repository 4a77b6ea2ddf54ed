"""Experts that transformers itself has loaded in FP8 (`FP8Experts`), packed into tiles."""

import copy
import gc
import weakref

import pytest
import quantized
import quantized_folders
import torch
from folder_cases import IDS, LAYER, change_quantization, stacks
from hf_models import assert_logits, transformers
from quantized_folders import make_adapters, make_folder
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import moelora
import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")

E4M3 = torch.float8_e4m3fn
KEPT = ["lm_head", "model.layers.*.self_attn", "mlp.gate"]
# Blocks of gate and up joined must be whole: transformers gives their scales no more room.
SIZES = {"blocks_of_64": (64, 192), "blocks_of_128": (128, 256)}


def qwen3(intermediate):
    config = quantized_folders.qwen3_moe()
    config.moe_intermediate_size = intermediate
    return config


@pytest.fixture(scope="module", params=SIZES)
def made(request, tmp_path_factory):
    """A folder with FP8 experts and plain attention, and the model in float32 of its weights."""
    block, intermediate = SIZES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    exact = make_folder(folder, "fp8", block, qwen3(intermediate))
    state, plain = load_file(folder / "model.safetensors"), exact.state_dict()
    for name in [name for name in state if "self_attn" in name]:
        if name.endswith("_scale_inv"):
            del state[name]
        else:
            state[name] = plain[name].bfloat16().contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change_quantization(folder, modules_to_not_convert=KEPT)
    return folder, exact


def load(folder, **options):
    """What `from_pretrained` makes where there is a GPU; without one it dequantizes."""
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    for module, _ in moelora_hf.moe_layers(model).values():
        assert isinstance(module, finegrained_fp8.FP8Experts)
        assert module.gate_up_proj.dtype == module.down_proj.dtype == E4M3
    return model


@pytest.mark.parametrize("activations", [None, "native"])
def test_enable(made, activations):
    """As `load_quantized` of the same folder, bit by bit, and as the weights dequantized."""
    folder, exact = made
    model = load(folder)
    moelora_hf.enable(model, activations=activations)
    got = model(IDS).logits
    other = moelora_hf.load_quantized(folder, attn_implementation="eager", activations=activations)
    for ours, theirs in zip(stacks(model).values(), stacks(other).values(), strict=True):
        assert torch.equal(ours.weights.data, theirs.weights.data)
        assert ours.weights.layout == theirs.weights.layout
        assert ours.weights.x_format == (activations or "group")
    assert torch.equal(got, other(IDS).logits)
    wanted, naive = exact(IDS).logits, quantized.in_bfloat16(exact)(IDS).logits
    if activations == "native":
        assert_logits(got, wanted, naive)
    else:
        error = (got.float() - wanted).abs().mean(-1).median() / wanted.abs().mean()
        assert error < 0.15, "a rounding to three bits of mantissa moves logits by little"
    assert torch.equal(copy.deepcopy(model)(IDS).logits, got)
    moelora_hf.enable(model)
    assert torch.equal(model(IDS).logits, got)
    with pytest.raises(ValueError, match="activations is 'fp8', wanted None: Qwen3MoeFor"):
        moelora_hf.enable(model, activations="fp8")


@pytest.mark.parametrize(
    "made, activations",
    [
        ("blocks_of_64", "native"),
        pytest.param("blocks_of_64", None, marks=pytest.mark.slow),
        pytest.param("blocks_of_128", None, marks=pytest.mark.slow),
        pytest.param("blocks_of_128", "native", marks=pytest.mark.slow),
    ],
    indirect=["made"],
)
def test_compiled(made, activations):
    torch.compiler.reset()
    model = load(made[0])
    moelora_hf.enable(model, activations=activations)
    del model.model.layers[1:]  # compilers trace each layer anew
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits, rtol=0.05, atol=0.2)


def test_adapters_in_a_mixed_batch(made, tmp_path):
    folder, exact = made
    adapters = make_adapters(exact, tmp_path)
    other, wanted, _ = quantized.serve(folder, adapters, IDS)
    model = load(folder)
    pool = moelora_hf.load_adapters(model, adapters)
    assert pool.dtype == torch.bfloat16
    logits = model(IDS, adapter_names=quantized.ROWS).logits
    assert torch.equal(logits, wanted)
    texts = model.generate(IDS, adapter_names=quantized.ROWS, max_new_tokens=4, do_sample=False)
    same = other.generate(IDS, adapter_names=quantized.ROWS, max_new_tokens=4, do_sample=False)
    assert torch.equal(texts, same)


def test_a_layer_loses_its_parameters_before_the_next_is_packed(made, monkeypatch):
    model = load(made[0])
    parameters = [weakref.ref(parameter) for parameter in stacks(model).values()]
    pack, seen = moelora.QuantizedWeights.from_fp8_block, []

    def counted(*args, **kwargs):
        gc.collect()
        seen.append(sum(parameter() is not None for parameter in parameters))
        return pack(*args, **kwargs)

    monkeypatch.setattr(moelora.QuantizedWeights, "from_fp8_block", counted)
    moelora_hf.enable(model)
    gc.collect()
    assert seen == [4, 4, 2, 2]
    assert not any(parameter() is not None for parameter in parameters)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert names == [], "scales go, too"


def test_the_implementation_alone_says_what_to_call(made):
    folder, _ = made
    model, message = load(folder), r"has weights of FP8 .* call .*enable\(model\)"
    before = model.config._experts_implementation
    with pytest.raises(RuntimeError, match=rf"{LAYER} {message}"):
        model.set_experts_implementation("moelora")
    assert model.config._experts_implementation == before
    model = load(folder, experts_implementation="moelora")
    with pytest.raises(RuntimeError, match=rf"FP8Experts {message}"):
        model(IDS)
    with pytest.raises(NotImplementedError, match=rf"{LAYER} has weights of FP8"):
        moelora_hf.new_pool(moelora_hf.moe_layers(model), 1, 4)
    moelora_hf.enable(model)
    assert torch.isfinite(model(IDS).logits).all()


# ---- experts that are refused, before anything has changed ----


def fill(name, value):
    return lambda model, experts: getattr(experts, name)[-1, 0].fill_(value)


def put(name, *shape, **options):
    """Another parameter."""
    new = torch.nn.Parameter(torch.ones(shape, **options), requires_grad=False)
    return lambda model, experts: setattr(experts, name, new)


def attribute(**values):
    return lambda model, experts: vars(experts).update(values)


def implementation(model, experts):
    model.config._experts_implementation_internal = "deepgemm_megamoe"


REFUSED = {
    "nan": (fill("down_proj", float("nan")), ValueError, r"1\.mlp.experts.down_proj: weight.* NaN"),
    "scale": (fill("gate_up_proj_scale_inv", 256.0), ValueError, "beyond 255, expected smaller"),
    "scales": (
        put("down_proj_scale_inv", 8, 1, 1),
        ValueError,
        r"down_proj: weight_scale_inv has shape \(8, 1, 1\)",
    ),
    "fp4": (
        put("down_proj", 8, 128, 96, dtype=torch.int8),
        NotImplementedError,
        r"down_proj is torch.int8, wanted torch.float8_e4m3fn",
    ),
    "meta": (
        lambda model, experts: experts.to("meta"),
        NotImplementedError,
        "gate_up_proj is on the meta device, wanted",
    ),
    "static": (
        attribute(activation_scheme="static"),
        NotImplementedError,
        "experts has blocks and activation_scheme='static', wanted 'dynamic'",
    ),
    "activation": (
        attribute(_apply_gate=lambda x: x[..., : x.size(-1) // 2].tanh()),
        NotImplementedError,
        r"layers\.1\.mlp\.experts: the activation of its gate of FP8Experts",
    ),
    "layout": (implementation, NotImplementedError, "experts_implementation='deepgemm_megamoe'"),
    "float32": (
        lambda model, experts: model.model.embed_tokens.float(),
        NotImplementedError,
        "is torch.float32 beside its experts of FP8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("call", ["enable", "load_adapters"])
def test_refused(made, case, call):
    change, error, message = REFUSED[case]
    model = load(made[0])
    change(model, model.model.layers[1].mlp.experts)
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message):
        if call == "enable":
            moelora_hf.enable(model)
        else:
            moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=4)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model.config._experts_implementation != "moelora"
    assert isinstance(model.hf_quantizer, FineGrainedFP8HfQuantizer)


def test_activations_that_are_none(made):
    model = load(made[0])
    with pytest.raises(ValueError, match="activations is 'int8', expected 'fp8' or 'native'"):
        moelora_hf.enable(model, activations="int8")
    assert model.model.layers[0].mlp.experts.down_proj.dtype == E4M3


# ---- scales of whole tensors ----


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_one_scale_for_each_weight(scheme):
    torch.manual_seed(0)
    config = qwen3(192)
    config.dtype = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    settings = transformers.FineGrainedFP8Config(weight_block_size=None, activation_scheme=scheme)
    finegrained_fp8.replace_with_fp8_linear(model, KEPT, settings, pre_quantized=True)
    meant = {}
    for name, (module, _) in moelora_hf.moe_layers(model).items():
        module.to_empty(device="cpu")
        for own in ("gate_up_proj", "down_proj"):
            weight, scales = getattr(module, own), getattr(module, f"{own}_scale_inv")
            weight.copy_((0.2 * torch.randn(weight.shape)).to(E4M3))
            scales.copy_(torch.rand(scales.shape) + 0.5)
            rows = scales.bfloat16().float().repeat_interleave(weight.size(1) // scales.size(1), 1)
            meant[f"{name}.{own}"] = (weight.float() * rows).bfloat16()
            if scheme == "static":
                getattr(module, f"{own}_activation_scale").copy_(torch.linspace(0.01, 0.02, 8))
    moelora_hf.enable(model)
    for name, stack in stacks(model).items():
        assert torch.equal(stack.weights.unpack(), meant[name])
        assert stack.weights.x_format == ("token" if scheme == "dynamic" else "static")
        if scheme == "static":
            assert stack.weights.x_scale == torch.tensor(0.02).item(), "the largest"
    assert torch.isfinite(model(IDS).logits).all()
