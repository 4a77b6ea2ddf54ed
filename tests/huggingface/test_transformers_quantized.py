"""Quantized experts in transformers: folders as they are published, read and served."""

import copy
import functools
import json
import re
import shutil

import pytest
import torch
from checks import largest_allocation
from covering import extent
from folder_cases import (
    IDS,
    LAYER,
    TENSORS,
    assert_mixed_batch,
    assert_weights,
    change_json,
    change_quantization,
    change_tensors,
    drop,
    put,
    quantized,
    quantized_folders,
    refused,
    split,
)
from hf_models import transformers
from quantized_folders import make_folder, nibbles_to_words
from safetensors.torch import load_file, save_file

import moelora.integrations.transformers as moelora_hf

pytestmark = pytest.mark.usefixtures("no_grad")

KINDS = [
    *(("mxfp4", 32), ("gptq", 64), ("gptq", 32), ("awq", 64), ("compressed-tensors", 32)),
    *(("fp8", 128), ("float-quantized", 0), ("bitsandbytes", 64)),
]
E4M3 = torch.float8_e4m3fn
W4 = {"num_bits": 4, "type": "int"}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a folder once; (folder, the model in float32 that has its weights)."""

    @functools.cache
    def make(kind, group):
        folder = tmp_path_factory.mktemp(kind)
        return folder, make_folder(folder, kind, group)

    return make


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}_g{kind[1]}")
def made(request, make):
    return make(*request.param)


@pytest.fixture
def folder_of(make):
    """The first folder of a kind."""
    return lambda kind: make(*next(each for each in KINDS if each[0] == kind))[0]


def native(folder) -> str | None:
    """What keeps activations of FP8 experts in bfloat16, so that weights alone are compared."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    is_fp8 = settings["quant_method"] == "fp8" or settings.get("format") == "float-quantized"
    return "native" if is_fp8 else None


def changed(folder, tmp_path, *, tensors=lambda t: t, config=lambda c: c):
    """A copy of a folder with other tensors or another config.json."""
    change_tensors(folder, tensors, tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    change_json(tmp_path / "config.json", config)
    return tmp_path


def test_experts_have_the_numbers_of_the_folder(made):
    """No stack of them is ever dequantized."""
    folder, exact = made
    own = "gate_up_proj" if native(folder) else "down_proj"  # whose tiles have half of its bytes
    stacks = [getattr(m, own) for m, _ in moelora_hf.moe_layers(exact).values()]
    with largest_allocation() as largest:
        model = moelora_hf.load_quantized(folder)
    assert 0 < largest.nbytes < min(stack.numel() * 2 for stack in stacks)
    assert_weights(model, exact)
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert not model.training


@pytest.mark.slow
def test_a_compiled_base_model(made):
    folder, _ = made
    options = {"attn_implementation": "eager", "activations": native(folder)}
    model = moelora_hf.load_quantized(folder, **options)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits, rtol=0.05, atol=0.2)


def test_a_model_made_by_other_means(made):
    """Experts on the meta device, everything else by hand."""
    folder, exact = made
    wanted = moelora_hf.load_quantized(folder, attn_implementation="eager")
    model = quantized.in_bfloat16(exact)
    for module, _ in moelora_hf.moe_layers(model).values():
        for own in ("gate_up_proj", "down_proj"):
            meta = torch.empty_like(getattr(module, own), device="meta")
            setattr(module, own, torch.nn.Parameter(meta))
    moelora_hf.load_quantized_experts(model, folder)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    assert next(moelora_hf.moe_layers(model)[LAYER][0].down_proj.parameters(), None) is None


def test_folders_of_several_files_and_an_index(made, tmp_path):
    folder, _ = made
    wanted = moelora_hf.load_quantized(folder)
    folder = shutil.copytree(folder, tmp_path / "split")
    split(folder)
    save_file({"of.another": torch.zeros(1)}, folder / "consolidated.safetensors")
    transformers.GenerationConfig(max_new_tokens=3).save_pretrained(folder)
    got = moelora_hf.load_quantized(folder)
    with torch.no_grad():
        assert torch.equal(got(IDS).logits, wanted(IDS).logits)
        assert got.generate(IDS, do_sample=False).shape[1] == IDS.shape[1] + 3


def test_adapters_in_a_mixed_batch(made, tmp_path):
    """The example's comparison, and generation: as with PEFT, row by row."""
    folder, exact = made
    options = {"attn_implementation": "eager", "activations": native(folder)}
    logits = assert_mixed_batch(folder, exact, tmp_path, IDS, activations=options["activations"])
    model = moelora_hf.load_quantized(folder, **options)
    base = model(IDS).logits
    assert torch.equal(copy.deepcopy(model)(IDS).logits, base)
    assert torch.equal(model.to("cpu")(IDS).logits, base)
    for i, row in enumerate(quantized.ROWS):
        assert torch.equal(logits[i], base[i]) == (row == "__base__")


def test_the_example(capsys, monkeypatch):
    """In CI of its first format; the others' batches: test_adapters_in_a_mixed_batch."""
    formats = quantized.CHECKPOINTS
    monkeypatch.setattr(quantized, "CHECKPOINTS", extent(nightly=formats, ci=formats[:1]))
    assert quantized.main() == 0
    assert capsys.readouterr().out.endswith("as dequantized weights and PEFT: True\n")


def test_what_such_a_model_cannot_do(made, tmp_path):
    folder, exact = made
    model = moelora_hf.load_quantized(folder)
    with pytest.raises(ValueError, match="not serializable|doesn't support|not support"):
        model.save_pretrained(tmp_path)
    moelora_hf.load_adapters(model, {}, max_loras=1, max_rank=4)
    with pytest.raises(RuntimeError, match="has adapters already"):
        moelora_hf.load_quantized_experts(model, folder)
    for other in ("eager", "batched_mm"):
        model.set_experts_implementation(other)
        with pytest.raises(RuntimeError, match="weights in tiles, which other"):
            model(IDS)
    exact = copy.deepcopy(exact).requires_grad_(True)
    with pytest.raises(ValueError, match=f"dtype of {LAYER} is torch.float32, wanted torch.bf"):
        moelora_hf.load_quantized_experts(exact, folder)
    moelora_hf.load_quantized_experts(exact, folder, dtype=torch.bfloat16)
    assert exact(IDS).logits.dtype == torch.float32
    with torch.enable_grad():  # through tiles, which have no gradient themselves
        exact(IDS).logits.sum().backward()
    assert exact.get_input_embeddings().weight.grad.any()


# ---- folders that are refused ----


UP = f"{LAYER}.1.up_proj"
DOWN = f"{LAYER}.3.down_proj"
Q_PROJ = "model.layers.1.self_attn.q_proj"
ONES = torch.ones(8, 8, dtype=torch.int64)
BAD_TENSORS = {
    "mxfp4 scales": (drop(f"{LAYER}.down_proj_scales"), r"no tensor .*0.mlp.experts.down_proj_s"),
    "mxfp4 shape": (
        put(f"{LAYER}.gate_up_proj_blocks", lambda t: t[:, :-2]),
        r"gate_up_proj_blocks has shape \(8, 382, 4, 16\), wanted \(8, 384, 4, 16\)",
    ),
    "mxfp4 nan": (
        put(f"{LAYER}.down_proj_scales", lambda t: t | 255),
        r"experts.down_proj: scales has the e8m0 byte 255, NaN, expected at most 128",
    ),
    "mxfp4 plain": (drop("model.norm.weight"), r"no tensor model.norm.weight \(1 are missing\)"),
    "mxfp4 bias": (drop(f"{LAYER}.down_proj_bias"), r"no tensor .*down_proj_bias \(1 are missing"),
    "mxfp4 more": (put(f"{LAYER}.odd_scales", [1.0]), "odd_scales is no tensor that"),
    "gptq expert": (drop(f"{UP}.qweight"), f"no tensor {UP}.qweight, which the model wants"),
    "gptq zeros": (drop(f"{UP}.qzeros"), f"have no qzeros, wanted all or none: {UP}$"),
    "gptq shape": (
        put(f"{UP}.scales", lambda t: t[:1]),
        rf"{UP}.scales is \(1, 192\) of torch.float16, wanted \(2, 192\) of torch.float16 as ",
    ),
    "gptq order": (put(f"{UP}.g_idx", lambda t: t.flip(0)), f"{UP}.g_idx is in another order"),
    "gptq infinite": (
        put(f"{DOWN}.scales", lambda t: t / 0),
        r"experts.\*.down_proj: scales\[3\] has a scale that is NaN, infinite or beyond 65504",
    ),
    "gptq bias": (put(f"{UP}.bias", [1.0] * 192), f"{UP}.bias is no tensor that gptq has in"),
    "gptq experts": (
        lambda t: t | {f"{LAYER}.8.up_proj.qweight": t[f"{UP}.qweight"] + 1},
        f"{LAYER}.8.up_proj.qweight is no tensor that gptq has",
    ),
    "gptq narrow": (
        lambda tensors: {
            n: t[..., :128] if re.search(r"\.experts\..*(gate|up)_proj.qweight$", n) else t
            for n, t in tensors.items()
        },
        r"experts.\*.gate_proj and up_proj: scales\[0\] has shape \(2, 384\), expected \(2, 256\)",
    ),
    "gptq attention": (
        lambda t: drop(f"{Q_PROJ}.weight")(t) | {f"{Q_PROJ}.qweight": nibbles_to_words(ONES)},
        f"no tensor {Q_PROJ}.scales, which the model wants",
    ),
    "fp8 scales": (drop(f"{UP}.weight_scale_inv"), f"no tensor {UP}.weight_scale_inv"),
    "fp8 nan": (
        put(f"{UP}.weight", lambda t: (t.float() * float("nan")).to(E4M3)),
        r"gate_proj and up_proj: weight\[1\] has a NaN, expected numbers",
    ),
    "fp8 dtype": (
        put(f"{DOWN}.weight", lambda t: t.bfloat16()),
        r"experts.\*.down_proj: weight\[3\] has dtype bfloat16, expected float8_e4m3fn",
    ),
    "fp8 attention": (drop(f"{Q_PROJ}.weight"), f"no tensor {Q_PROJ}.weight"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(folder_of, tmp_path, case):
    tensors, message = BAD_TENSORS[case]
    refused(changed(folder_of(case.split()[0]), tmp_path, tensors=tensors), message)


def group(of_weights=None, **more):
    """Settings of compressed-tensors, of one group."""
    return {"config_groups": {"g": {"weights": W4 | (of_weights or {}), **more}}}


UNREAD, CT = NotImplementedError, "compressed-tensors"


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("mxfp4", {"quant_method": "bnb"}, UNREAD, "quant_method is 'bnb', wan"),
        ("mxfp4", {"quant_method": "gptq"}, ValueError, "up_proj of expert 0 of .*; none"),
        ("gptq", {"bits": 3}, UNREAD, "GPTQ: bits is 3, wanted 4, or 2, 4, 8 of"),
        ("gptq", {"group_size": 32}, ValueError, r"scales\[0\] has groups of 64, expected"),
        ("gptq", {"quant_method": "awq"}, ValueError, r"gate_proj and up_proj: scales\[0\]"),
        (
            *(CT, {"format": "int-quantized"}, UNREAD),
            "has weight_packed, .* which none of config_groups has: {.*'int-quantized'}",
        ),
        (
            *(CT, group(input_activations={"num_bits": 8}), UNREAD),
            r"INT4 \(W4A8\) of compressed-tensors; no kernel takes activations of 8 bits with INT4",
        ),
        (CT, group({"symmetric": False}), ValueError, f"no tensor {LAYER}.0.gate_proj.weight_zero"),
        ("fp8", {"fmt": "e5m2"}, UNREAD, "fp8: fmt is 'e5m2', wanted 'e4m3'"),
        ("fp8", {"weight_block_size": [64, 128]}, ValueError, r"_inv has shape \(1, 1\), w"),
        ("fp8", {"weight_block_size": None}, ValueError, "there is no weight_block_size, which"),
        ("float-quantized", {"config_groups": {}}, UNREAD, "there are no config_groups, wanted"),
    ],
)
def test_bad_settings(folder_of, tmp_path, kind, changes, error, message):
    folder = changed(folder_of(kind), tmp_path)
    change_quantization(folder, **changes)
    refused(folder, message, error)


def test_activations_are_quantized_as_the_folder_says(folder_of):
    for kind, x_format in (("fp8", "group"), ("float-quantized", "token")):
        folder = folder_of(kind)
        model = moelora_hf.load_quantized(folder, attn_implementation="eager")
        experts = model.get_submodule(LAYER)
        for name in ("gate_up_proj", "down_proj"):
            assert getattr(experts, name).weights.x_format == x_format
        exact = moelora_hf.load_quantized(folder, attn_implementation="eager", activations="native")
        got, want = (m(IDS).logits.float() for m in (model, exact))
        assert not torch.equal(got, want)
        error = (got - want).abs().mean(-1).median() / want.abs().mean()
        assert error < 0.15, "a rounding to three bits of mantissa moves logits by little"


def test_activations_are_for_the_layers_of_fp8(folder_of, tmp_path):
    """Another layer's experts may not be quantized, or have another scheme."""

    def one_layer_plain(tensors):
        for name in [name for name in tensors if name.startswith(LAYER) and "_scale" not in name]:
            scale = tensors.pop(f"{name}_scale")
            tensors[name] = (tensors[name].float() * scale).bfloat16()

    folder = changed(folder_of("float-quantized"), tmp_path, tensors=one_layer_plain)
    model = moelora_hf.load_quantized(folder, activations="native")
    plain, packed = (module for module, _ in moelora_hf.moe_layers(model).values())
    assert plain.down_proj.dtype == torch.bfloat16
    assert packed.down_proj.weights.x_format == "native"


def test_deepseek(tmp_path):
    """With shared experts, a dense layer and a projection of attention that is not quantized."""
    config = transformers.DeepseekV3Config(
        **{**quantized_folders.COMMON, "num_key_value_heads": 4, "head_dim": 16},
        intermediate_size=192,
        moe_intermediate_size=192,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
    exact = make_folder(tmp_path, "fp8", 128, config)
    assert "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv" in load_file(tmp_path / TENSORS)
    wanted = exact(IDS).logits
    for activations, bound in (("bf16", 0.03), (None, 0.15)):
        options = {"attn_implementation": "eager", "activations": activations}
        model = moelora_hf.load_quantized(tmp_path, **options)
        error = (model(IDS).logits.float() - wanted).abs().mean(-1).median()
        assert error / wanted.abs().mean() < bound


def of_whole_weights(tensors):
    """An FP8 folder of blocks as one with a scale for each weight, and one for what it takes."""
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        linear = name.removesuffix(".weight_scale_inv")
        scale = tensors.pop(name).max()
        tensors[f"{linear}.weight_scale"] = scale
        tensors[f"{linear}.input_scale"] = torch.tensor(0.02) * (1 + ("up" in linear))


def test_one_scale_for_each_weight(folder_of, tmp_path):
    def static(config):
        config["quantization_config"] |= {"activation_scheme": "static"}
        del config["quantization_config"]["weight_block_size"]

    folder = changed(folder_of("fp8"), tmp_path, tensors=of_whole_weights, config=static)
    model = moelora_hf.load_quantized(folder)
    experts, tensors = model.get_submodule(LAYER), load_file(folder / TENSORS)
    weights = experts.gate_up_proj.weights
    assert (weights.x_format, weights.x_scale) == ("static", torch.tensor(0.04).item())
    for part, half in zip(("gate_proj", "up_proj"), weights.unpack()[1].chunk(2), strict=True):
        linear = f"{LAYER}.1.{part}"
        scale = tensors[f"{linear}.weight_scale"].bfloat16().float()
        want = (tensors[f"{linear}.weight"].float() * scale).bfloat16()
        assert torch.equal(half, want)
    assert torch.isfinite(model(IDS).logits).all()


def test_biases_of_zeros_are_none(folder_of, tmp_path):
    folder = changed(folder_of("gptq"), tmp_path, tensors=put(f"{UP}.bias", [0.0] * 192))
    moelora_hf.load_quantized(folder)


def test_the_text_model_of_a_folder_of_both(folder_of, tmp_path):
    """The text model's tensors beside config.json of the class that has a tower, too."""
    text = json.loads((folder_of("fp8") / "config.json").read_text())
    both = transformers.Qwen3VLMoeConfig(text_config={"head_dim": 32}).to_dict()
    both["text_config"] |= {k: v for k, v in text.items() if k in both["text_config"]}
    both["text_config"]["model_type"] = "qwen3_vl_moe_text"
    both["vision_config"] |= {"depth": 1, "hidden_size": 16, "intermediate_size": 16}
    both["vision_config"] |= {"num_heads": 2, "out_hidden_size": 128}
    both["vision_config"]["deepstack_visual_indexes"] = []
    both["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    both["quantization_config"] = text["quantization_config"]
    folder = changed(folder_of("fp8"), tmp_path, config=lambda config: both)
    refused(
        folder,
        "which Qwen3VLMoeForConditionalGeneration wants: it has model.embed_tokens.weight, "
        r"as \d+ of them are called in the text model alone; its config.json must be that of the",
    )
