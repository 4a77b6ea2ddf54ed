"""A Qwen3-MoE checkpoint with quantized experts, and the same numbers unquantized.

    python -m benchmarks.engines.vllm_quantize --model /tmp/tiny --format int4 --out /tmp/tiny-int4

Reads a folder of `engine_model` (manifest.json, base, adapters) and writes OUT, whose
experts are quantized and whose other weights are not, and OUT-dense, whose experts are the numbers
that OUT's stand for, rounded to bfloat16. Both have the adapters of the model. --only-quantized
leaves OUT-dense out.

int4         compressed-tensors, "pack-quantized", symmetric, groups of 128
nvfp4        compressed-tensors, "nvfp4-pack-quantized", weights only (W4A16)
modelopt     NVFP4 as ModelOpt has it, with scales of the activations, which are 1
fp8          blocks of 128 by 128
fp8_channel  compressed-tensors, "float-quantized", a scale for each row

Activations of all kinds of FP8 are quantized on the way, nothing about them is in the checkpoint.
Scales of four bits are numbers of bfloat16 as well as of float16, so that no engine rounds them.
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file

from benchmarks.engines.engine_model import save, save_index

GROUP = 128
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
LEAST = 2.0**-14  # the smallest scale: float16 has fewer bits below


def words(q):
    """Eight numbers of the last dimension in an int32."""
    eights = q.unflatten(-1, (-1, 8)).to(torch.int64)
    packed = sum(eights[..., i] << 4 * i for i in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def int4(weight):
    """Quantize to (tensors of the checkpoint by name, dequantized weight)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).clamp(min=LEAST).bfloat16()
    q = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    dense = (q * scales.float()[..., None]).flatten(1)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    packed = words(q.flatten(1) + 8)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}, dense


def nvfp4(weight):
    """vLLM takes one global scale for gate and up, so all tensors have that of a maximum of 8."""
    whole = 448.0 * 6.0 / 8
    groups = weight.float().unflatten(1, (-1, 16))
    if groups.abs().amax() > 8:
        raise SystemExit(f"weights up to {groups.abs().amax():.3g}, wanted 8 at most")
    scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    factors = (scales.float() / whole)[..., None]
    values = torch.tensor(E2M1, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize((groups / factors.clamp(min=1e-9)).abs(), middles)
    dense = values[codes] * groups.sign() * factors
    codes = (codes | (groups < 0).long() << 3).flatten(1)
    return {
        "weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([whole]),
    }, dense.flatten(1)


def modelopt(weight):
    """The numbers of `nvfp4`, whose tensor's scale is a factor here and a divisor there."""
    parts, dense = nvfp4(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"].reshape(()),
        "input_scale": torch.ones(()),
    }, dense


def fp8_channel(weight):
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-10).bfloat16()
    q = (weight.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scales}, q.float() * scales.float()


def fp8(weight):
    blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-10)
    q = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (q.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)
    return {"weight": q.flatten(0, 1).flatten(1), "weight_scale_inv": scales}, dense


FORMATS = {f.__name__: f for f in (int4, nvfp4, modelopt, fp8, fp8_channel)}
PLAIN = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]  # as compressed-tensors says it


def compressed(format, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": PLAIN,
        "quantization_status": "compressed",
    }


def settings(format, layers):
    """`quantization_config`: only experts."""
    if format == "int4":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": GROUP}
        return compressed("pack-quantized", weights)
    if format == "nvfp4":
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "tensor_group", "group_size": 16}
        return compressed("nvfp4-pack-quantized", weights)
    if format == "modelopt":
        plain = ["lm_head", "*self_attn*", "*mlp.gate"]
        method = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        return method | {"group_size": 16, "ignore": plain}
    if format == "fp8_channel":
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = number | {"strategy": "channel", "dynamic": False}
        return compressed(
            "float-quantized", weights, number | {"strategy": "token", "dynamic": True}
        )
    plain = [
        f"model.layers.{i}.{name}"
        for i in range(layers)
        for name in (*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate")
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": ["lm_head", *plain],
    }


def both(tensors, quantize):
    """Tensors of the quantized checkpoint, and of the dense one."""
    quantized, dense = dict(tensors), dict(tensors)
    for name in (name for name in tensors if ".experts." in name):
        parts, numbers = quantize(quantized.pop(name))
        quantized |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        dense[name] = numbers.bfloat16()
    return quantized, dense


def write(source, folders, quantize, device):
    """Write every weight file to `folders`: quantized to the first one, dequantized to the
    others."""
    maps = [{} for _ in folders]
    for file in sorted(source.glob("*.safetensors")):
        made = both(load_file(file, device), quantize)
        for folder, tensors, index in zip(folders, made, maps, strict=False):
            index |= save(folder, file.name, tensors)
    for folder, index in zip(folders, maps, strict=True):
        save_index(folder, index)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--format", choices=FORMATS, required=True)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--only-quantized", action="store_true", help="no OUT-dense")
    args = p.parse_args(argv)
    manifest = json.loads((args.model / "manifest.json").read_text())
    source = pathlib.Path(manifest["base"])
    config = json.loads((source / "config.json").read_text())
    extra = {"quantization_config": settings(args.format, config["num_hidden_layers"])}
    folders = []
    made = [(args.out, extra), (args.out.with_name(f"{args.out.name}-dense"), {})]
    for out, more in made[:1] if args.only_quantized else made:
        shutil.rmtree(out, ignore_errors=True)
        base = out / "base"
        shutil.copytree(source, base, ignore=shutil.ignore_patterns("*.safetensors*"))
        (base / "config.json").write_text(json.dumps(config | more, indent=1))
        (out / "manifest.json").write_text(json.dumps(manifest | {"base": str(base)}, indent=1))
        folders.append(base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(source, folders, FORMATS[args.format], device)
    print(f"made {' and '.join(str(f) for f in folders)} on {device}")


if __name__ == "__main__":
    main()
