"""Checkpoints of the end-to-end benchmark: quantized ones say what their dense ones do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import moelora
from benchmarks.engines import answers, engine_reference, vllm_gpt_oss, vllm_quantize


def quantized_and_dense(tmp_path, format):
    base = tmp_path / "tiny" / "base"
    base.mkdir(parents=True)
    make = torch.Generator().manual_seed(0)
    names = ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.gate.weight"]
    save_file(
        {n: torch.randn(256, 128, generator=make).bfloat16() for n in names}, base / "m.safetensors"
    )
    (base / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    (tmp_path / "tiny" / "manifest.json").write_text(json.dumps({"base": str(base)}))
    out = tmp_path / f"tiny-{format}"
    vllm_quantize.main(["--model", str(tmp_path / "tiny"), "--format", format, "--out", str(out)])
    found = [load_file(f / "base" / "m.safetensors") for f in (out, tmp_path / f"{out.name}-dense")]
    config = json.loads((out / "base" / "config.json").read_text())
    shutil.rmtree(tmp_path / f"{out.name}-dense")
    again = ["--model", str(tmp_path / "tiny"), "--format", format, "--only-quantized"]
    vllm_quantize.main([*again, "--out", str(out)])
    assert load_file(out / "base" / "m.safetensors").keys() == found[0].keys()
    assert not (tmp_path / f"{out.name}-dense").exists()
    return names, load_file(base / "m.safetensors"), *found, config["quantization_config"]


GROUPS = {"group_size": 128}
CHECKPOINTS = {  # constructor, its tensors and options, largest error, a setting of config.json
    "int4": (
        *("from_compressed_tensors", "weight_packed weight_scale", GROUPS, 0.15),
        ("quant_method", "compressed-tensors"),
    ),
    "gptq": (
        *("from_gptq", "qweight scales qzeros g_idx", GROUPS | {"sym": True}, 0.15),
        ("quant_method", "gptq"),
    ),
    "awq": ("from_awq", "qweight scales qzeros", GROUPS, 0.15, ("quant_method", "awq")),
    "nvfp4": (
        *("from_nvfp4", "weight_packed weight_scale weight_global_scale=", {}, 0.12),
        ("format", "nvfp4-pack-quantized"),
    ),
    "modelopt": (
        *("from_nvfp4", "weight weight_scale weight_scale_2=", {}, 0.12),
        ("quant_algo", "NVFP4"),
    ),
    "fp8_channel": (
        *("from_fp8_channel", "weight weight_scale", {}, 0.05),
        ("weight_block_size", None),
    ),
    "fp8_tensor": (
        *("from_fp8_tensor", "weight weight_scale", {}, 0.05),
        ("weight_block_size", None),
    ),
}


@pytest.mark.parametrize("format", CHECKPOINTS)
def test_checkpoints_are_what_their_dense_ones_say(tmp_path, format):
    (expert, gate), plain, quantized, dense, config = quantized_and_dense(tmp_path, format)
    make, names, options, most, (setting, value) = CHECKPOINTS[format]
    assert config.get(setting) == value
    stem = expert.removesuffix("weight")
    parts = {name: quantized[stem + name.strip("=")][None] for name in names.split()}
    named = {name.strip("="): part for name, part in parts.items() if name.endswith("=")}
    tensors = [part for name, part in parts.items() if not name.endswith("=")]
    weights = getattr(moelora.QuantizedWeights, make)(*tensors, **named, **options)
    assert weights.has_zeros == (format == "awq")
    assert torch.equal(weights.unpack()[0], dense[expert])
    if "group_size" in options:  # an engine loads these scales in bfloat16
        assert torch.equal(tensors[1].float(), tensors[1].bfloat16().float())
    if format == "modelopt":
        assert quantized[f"{stem}input_scale"] == 1
    error = (dense[expert] - plain[expert]).float().norm() / plain[expert].float().norm()
    assert 0 < error < most
    assert torch.equal(quantized[gate], plain[gate]) and torch.equal(dense[gate], plain[gate])


def test_fp8_checkpoints_are_what_their_dense_ones_say(tmp_path):
    (expert, _), _, quantized, dense, config = quantized_and_dense(tmp_path, "fp8")
    assert config["weight_block_size"] == [128, 128]
    scales = quantized[expert.replace("weight", "weight_scale_inv")]
    assert scales.shape == (2, 1)
    wanted = quantized[expert].float() * scales.repeat_interleave(128, 0)
    assert torch.equal(wanted.bfloat16(), dense[expert])


@pytest.fixture
def small_gpt_oss(monkeypatch):
    sizes = {"HIDDEN": 96, "INTER": 64, "EXPERTS": 2, "HEADS": 4, "KV_HEADS": 2, "HEAD": 8}
    for name, size in sizes.items():
        monkeypatch.setattr(vllm_gpt_oss, name, size)
    return monkeypatch


def test_gpt_oss_of_random_numbers(tmp_path, small_gpt_oss):
    out = tmp_path / "oss"
    vllm_gpt_oss.main(["--out", str(out), "--layers", "1", "--ranks", "4"])
    layer = "layer-00.safetensors"
    quantized, dense = (load_file(f / "base" / layer) for f in (out, tmp_path / "oss-dense"))
    for name in ("gate_up_proj", "down_proj"):
        stem = f"model.layers.0.mlp.experts.{name}"
        parts = quantized[f"{stem}_blocks"], quantized[f"{stem}_scales"]
        weights = moelora.QuantizedWeights.from_mxfp4(*parts)
        assert torch.equal(weights.unpack(), dense[stem].transpose(1, 2))
    (adapter,) = json.loads((out / "manifest.json").read_text())["adapters"]
    factors = load_file(f"{adapter}/adapter_model.safetensors")
    shapes = {name.split("experts.")[1]: tuple(t.shape) for name, t in factors.items()}
    assert shapes["base_layer.lora_A.weight"] == (2 * 4, 96)
    assert shapes["lora_B.weight"] == (96, 4 * 2)
    alone = tmp_path / "alone"
    vllm_gpt_oss.main(["--out", str(alone), "--layers", "1", "--ranks", "4", "--only-quantized"])
    again = load_file(alone / "base" / layer)
    assert all(torch.equal(again[name], quantized[name]) for name in quantized)
    assert not (tmp_path / "alone-dense").exists()


@torch.no_grad()
def with_peft(manifest, prompts):
    """Log-probabilities of the base model and of each adapter, by transformers and PEFT."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    found = []
    for adapter in (None, *manifest["adapters"]):
        how = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(manifest["base"], **how).eval()
        if adapter:
            config = peft.PeftConfig.from_pretrained(adapter)
            config.target_modules = []  # vLLM asks for experts there, PEFT has no layer for them
            model = peft.PeftModel.from_pretrained(model, adapter, config=config).eval()
        rows = [torch.log_softmax(model(torch.tensor([p])).logits[0], -1) for p in prompts]
        found.append(
            [
                [row[i, token].item() for i, token in enumerate(prompt[1:])]
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        )
    return found


def test_the_reference_of_gpt_oss_is_that_of_peft(tmp_path, small_gpt_oss, capsys):
    small_gpt_oss.setattr(vllm_gpt_oss, "EXPERTS", 4)
    small_gpt_oss.setattr(vllm_gpt_oss, "TOP_K", 2)
    small_gpt_oss.setattr(vllm_gpt_oss, "VOCAB", 64)
    out, lps = tmp_path / "oss", tmp_path / "lps.json"
    vllm_gpt_oss.main(["--out", str(out), "--layers", "2", "--ranks", "4,8"])
    manifest = json.loads((tmp_path / "oss-dense" / "manifest.json").read_text())
    make = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (n,), generator=make).tolist() for n in (9, 14)]
    names = ["base", *(a.rpartition("/")[2] for a in manifest["adapters"])]
    exact = with_peft(manifest, prompts)

    def check(lines):
        lps.write_text(json.dumps({"names": names, "prompts": prompts, "lps": lines}))
        words = ["--model", str(tmp_path / "oss-dense"), "--lps", str(lps)]
        capsys.readouterr()
        return engine_reference.main(words), capsys.readouterr().out.splitlines()

    status, said = check(exact)
    assert (status, said[-1]) == (0, "reference check OK")
    far = answers.distances(said)
    assert list(far) == names and max(far.values()) < 1e-4
    status, said = check([exact[0], exact[2], exact[1]])
    assert (status, said[-1]) == (1, "reference check FAILED")
    assert [line.split()[-1] for line in said[-4:-1]] == ["ok", "BAD", "BAD"]
