"""A checkpoint with quantized experts, and the same numbers unquantized.

    python -m benchmarks.engines.vllm_quantize --model /tmp/tiny --format int4 --out /tmp/tiny-int4

Reads a folder of `engine_model` (manifest.json, base, adapters) and writes OUT, whose experts are
quantized and whose other weights are not, and OUT-dense, whose experts are the numbers that OUT's
stand for, rounded to bfloat16. Both have the adapters of the model. --only-quantized leaves
OUT-dense out.

int4         compressed-tensors, "pack-quantized", symmetric, groups of 128
nvfp4        compressed-tensors, "nvfp4-pack-quantized", weights only (W4A16)
modelopt     NVFP4 as ModelOpt has it, with scales of the activations, which are 1
mxfp4        of a gpt-oss
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

from benchmarks.engines.engine_model import device, save_json, save_weights

GROUP = 128
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
LEAST = 2.0**-14  # the smallest scale: float16 has fewer bits below
MOST_NVFP4 = 8  # vLLM takes one global scale for gate and up: all tensors have that of this maximum


def pairs(codes):
    """Two codes of four bits in a byte."""
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def e2m1(groups, scales):
    """(codes of the nearest numbers, the numbers that they stand for)."""
    values = torch.tensor(E2M1, device=groups.device)
    scales = scales[..., None]
    middles = (values[1:8] + values[:7]) / 2
    codes = torch.bucketize((groups / scales.clamp(min=1e-9)).abs().contiguous(), middles)
    codes |= (groups < 0).long() << 3
    return pairs(codes), (values[codes] * scales).flatten(-2)


def int4(weight):
    """Quantize to (tensors of the checkpoint by name, dequantized weight)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).clamp(min=LEAST).bfloat16()
    q = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    packed, shape = pairs(q + 8).view(torch.int32), torch.tensor(weight.shape)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}
    return parts, (q * scales.float()[..., None]).flatten(1)


def nvfp4(weight):
    whole = 448.0 * 6.0 / MOST_NVFP4
    groups = weight.float().unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    codes, dense = e2m1(groups, scales.float() / whole)
    parts = {"weight_packed": codes, "weight_scale": scales}
    return parts | {"weight_global_scale": torch.tensor([whole])}, dense


def modelopt(weight):
    """The numbers of `nvfp4`, whose tensor's scale is a factor here and a divisor there."""
    parts, dense = nvfp4(weight)
    factor = 1 / parts["weight_global_scale"].reshape(())
    parts = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    return parts | {"weight_scale_2": factor, "input_scale": torch.ones(())}, dense


def mxfp4(weights):
    """Of all experts of a layer, (E, columns, rows)."""
    groups = weights.float().transpose(1, 2).unflatten(2, (-1, 32))
    powers = (groups.abs().amax(-1) / 6).clamp(min=LEAST).log2().ceil()
    codes, dense = e2m1(groups, torch.exp2(powers))
    parts = {"_blocks": codes.unflatten(2, (-1, 16)), "_scales": (powers + 127).to(torch.uint8)}
    return parts, dense.transpose(1, 2)


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


FORMATS = {f.__name__: f for f in (int4, nvfp4, modelopt, mxfp4, fp8, fp8_channel)}


def compressed(format, weights, inputs=None):
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    plain = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    found = {"quant_method": "compressed-tensors", "format": format, "ignore": plain}
    return found | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}


def number(bits, type, strategy, dynamic=False, **more):
    more |= {"num_bits": bits, "type": type, "strategy": strategy}
    return more | {"symmetric": True, "dynamic": dynamic}


def settings(format, layers):
    """`quantization_config`: only experts."""
    linear = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate")
    linear = [f"model.layers.{i}.{name}" for i in range(layers) for name in linear]
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    fp8 |= {"weight_block_size": [GROUP, GROUP], "modules_to_not_convert": ["lm_head", *linear]}
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    weights, inputs = number(8, "float", "channel"), number(8, "float", "token", dynamic=True)
    nvfp4 = number(4, "float", "tensor_group", group_size=16)
    return {
        "int4": compressed("pack-quantized", number(4, "int", "group", group_size=GROUP)),
        "nvfp4": compressed("nvfp4-pack-quantized", nvfp4),
        "modelopt": modelopt | {"ignore": ["lm_head", "*self_attn*", "*mlp.gate"]},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": [*plain, "lm_head"]},
        "fp8": fp8,
        "fp8_channel": compressed("float-quantized", weights, inputs),
    }[format]


def both(tensors, quantize):
    """Tensors of the quantized checkpoint, and of the dense one."""
    quantized, dense = dict(tensors), dict(tensors)
    for name in tensors:
        if ".experts." in name and not name.endswith("bias"):
            parts, numbers = quantize(quantized.pop(name))
            quantized |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
            dense[name] = numbers.bfloat16()
    return quantized, dense


def write(model, format, out, dense=None):
    """Write a model with quantized experts, and to `dense` the one with the same numbers."""
    manifest = json.loads((model / "manifest.json").read_text())
    source = pathlib.Path(manifest["base"])
    config = json.loads((source / "config.json").read_text())
    extra = {"quantization_config": settings(format, config["num_hidden_layers"])}
    made = {out: config | extra} | ({dense: config} if dense else {})
    for folder, config in made.items():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder / "base", ignore=shutil.ignore_patterns("*.safetensors*"))
        save_json(folder / "base/config.json", config)
        save_json(folder / "manifest.json", manifest | {"base": str(folder / "base")})
    quantize, files = FORMATS[format], sorted(source.glob("*.safetensors"))
    parts = ((file.name, both(load_file(file, device()), quantize)) for file in files)
    save_weights([folder / "base" for folder in made], parts)
    print(f"made {' and '.join(map(str, made))} on {device()}")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--format", choices=FORMATS, required=True)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--only-quantized", action="store_true", help="no OUT-dense")
    args = p.parse_args(argv)
    dense = None if args.only_quantized else args.out.with_name(f"{args.out.name}-dense")
    write(args.model, args.format, args.out, dense)


if __name__ == "__main__":
    main()
