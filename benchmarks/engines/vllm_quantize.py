"""A Qwen3-MoE checkpoint with quantized experts, and the same numbers unquantized.

    python -m benchmarks.engines.vllm_quantize --model /tmp/tiny --format int4 --out /tmp/tiny-int4

Reads a folder of `engine_model` (manifest.json, base, adapters) and writes OUT, whose
experts are quantized and whose other weights are not, and OUT-dense, whose experts are the numbers
that OUT's stand for, rounded to bfloat16. Both have the adapters of the model. --only-quantized
leaves OUT-dense out.

int4         compressed-tensors, "pack-quantized", symmetric, groups of 128
gptq         symmetric, groups of 128, in the order of the columns
awq          as AutoAWQ has it, with zero points, groups of 128
nvfp4        compressed-tensors, "nvfp4-pack-quantized", weights only (W4A16)
modelopt     NVFP4 as ModelOpt has it, with scales of the activations, which are 1
fp8          blocks of 128 by 128
fp8_channel  compressed-tensors, "float-quantized", a scale for each row
fp8_tensor   a scale for each projection of each expert

Activations of all kinds of FP8 are quantized on the way, nothing about them is in the checkpoint.
Scales of four bits are numbers of bfloat16 as well as of float16, so that no engine rounds them.
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
LEAST = 2.0**-14  # the smallest scale: float16 has fewer bits below


def words(q, order=range(8)):
    """Eight numbers of the last dimension in an int32, number order[i] in its nibble i."""
    eights = q.unflatten(-1, (-1, 8)).to(torch.int64)
    packed = sum(eights[..., k] << 4 * i for i, k in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def four_bits(weight, zero_points=False):
    """Numbers of 0 to 15 (N, K), scales and zero points of groups (N, G), and what they mean."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    if zero_points:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=LEAST).bfloat16()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7).clamp(min=LEAST).bfloat16()
        zeros = torch.full_like(scales.float(), 8)
    q = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    dense = (q - zeros[..., None]) * scales.float()[..., None]
    return q.flatten(1), scales, zeros, dense.flatten(1)


def int4(weight):
    """Quantize to (tensors of the checkpoint by name, dequantized weight)."""
    q, scales, _, dense = four_bits(weight)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": words(q), "weight_scale": scales, "weight_shape": shape}, dense


def gptq(weight):
    q, scales, zeros, dense = four_bits(weight)
    return {
        "qweight": words(q).t(),
        "qzeros": words(zeros.t() - 1),  # version 1 of the format adds it again
        "scales": scales.t().half(),
        "g_idx": torch.arange(weight.size(1), dtype=torch.int32) // GROUP,
    }, dense


def awq(weight):
    q, scales, zeros, dense = four_bits(weight, zero_points=True)
    return {
        "qweight": words(q.t(), AWQ_ORDER),
        "qzeros": words(zeros.t(), AWQ_ORDER),
        "scales": scales.t().half(),
    }, dense


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


def e4m3(weight, dim):
    """Quantize to (e4m3 values, scales reduced over `dim`, dequantized weight)."""
    scales = (weight.float().abs().amax(dim, keepdim=True) / 448).clamp(min=1e-10).bfloat16()
    q = (weight.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, scales, q.float() * scales.float()


def fp8_channel(weight):
    q, scales, dense = e4m3(weight, 1)
    return {"weight": q, "weight_scale": scales}, dense


def fp8_tensor(weight):
    q, scale, dense = e4m3(weight, (0, 1))
    return {"weight": q, "weight_scale": scale.reshape(())}, dense


def fp8(weight):
    blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-10)
    q = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (q.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)
    return {"weight": q.flatten(0, 1).flatten(1), "weight_scale_inv": scales}, dense


FORMATS = {f.__name__: f for f in (int4, gptq, awq, nvfp4, modelopt, fp8, fp8_channel, fp8_tensor)}
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
    grouped = {"bits": 4, "group_size": GROUP}
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
    if format == "gptq":
        plain = {f"-:{name}": {} for name in ("lm_head", r".*self_attn\..*", r".*mlp\.gate$")}
        order = {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "dynamic": plain}
        return {"quant_method": "gptq"} | grouped | order
    if format == "awq":
        kind = {"zero_point": True, "version": "gemm"}
        plain = ["lm_head", "self_attn", "mlp.gate"]  # whatever has one of these in its name
        return {"quant_method": "awq"} | grouped | kind | {"modules_to_not_convert": plain}
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
        **({"weight_block_size": [GROUP, GROUP]} if format == "fp8" else {}),
        "modules_to_not_convert": ["lm_head", *plain],
    }


def write(source, folders, quantize, device):
    """Write every weight file to `folders`: quantized to the first one, dequantized to the
    others."""
    maps = [{} for _ in folders]
    for file in sorted(source.glob("*.safetensors")):
        made = [{} for _ in folders]
        with safe_open(file, "pt", device=device) as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                if ".experts." in name:
                    stem = name.removesuffix("weight")
                    parts, dense = quantize(tensor)
                    made[0].update({f"{stem}{n}": t.cpu() for n, t in parts.items()})
                    for group in made[1:]:
                        group[name] = dense.bfloat16().cpu()
                else:
                    for group in made:
                        group[name] = tensor.cpu()
        for folder, group, where in zip(folders, made, maps, strict=True):
            group = {name: t.contiguous() for name, t in group.items()}
            save_file(group, folder / file.name, metadata={"format": "pt"})
            where.update(dict.fromkeys(group, file.name))
    for folder, where in zip(folders, maps, strict=True):
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


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
