"""A Qwen3-MoE checkpoint with quantised experts, and the same numbers unquantised.

    python -m benchmarks.vllm_quantise --model /tmp/tiny --format int4 --out /tmp/tiny-int4

Reads a folder of `benchmarks.engine_model` (manifest.json, base, adapters) and writes OUT, whose
experts are quantised and whose other weights are not, and OUT-dense, whose experts are the numbers
that OUT's stand for, rounded to bfloat16. Both have the adapters of the model. --only-quantised
leaves OUT-dense out.

int4  compressed-tensors, "pack-quantized", symmetric, groups of 128
fp8   blocks of 128 by 128, activations quantised on the way
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128


def int4(weight):
    """Tensors of the checkpoint by name, and what they stand for."""
    rows, columns = weight.shape
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).clamp(min=1e-8).bfloat16()
    q = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int32)
    eights = (q + 8).unflatten(1, (-1, 8)).to(torch.int64)
    words = sum(eights[..., i] << 4 * i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    dense = (q.unflatten(1, (-1, GROUP)) * scales.float()[..., None]).flatten(1)
    shape = torch.tensor([rows, columns], dtype=torch.int64)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, dense


def fp8(weight):
    blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-10)
    q = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (q.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)
    return {"weight": q.flatten(0, 1).flatten(1), "weight_scale_inv": scales}, dense


FORMATS = {"int4": int4, "fp8": fp8}


def settings(format, layers):
    """`quantization_config`: experts alone."""
    if format == "int4":
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
            "quantization_status": "compressed",
        }
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


def write(source, folders, quantise, device):
    """Every file of weights, for `folders`: as quantised, and as what that stands for."""
    maps = [{} for _ in folders]
    for file in sorted(source.glob("*.safetensors")):
        made = [{} for _ in folders]
        with safe_open(file, "pt", device=device) as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                if ".experts." in name:
                    stem = name.removesuffix("weight")
                    parts, dense = quantise(tensor)
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
    p.add_argument("--only-quantised", action="store_true", help="no OUT-dense")
    args = p.parse_args(argv)
    manifest = json.loads((args.model / "manifest.json").read_text())
    source = pathlib.Path(manifest["base"])
    config = json.loads((source / "config.json").read_text())
    extra = {"quantization_config": settings(args.format, config["num_hidden_layers"])}
    folders = []
    made = [(args.out, extra), (args.out.with_name(f"{args.out.name}-dense"), {})]
    for out, more in made[:1] if args.only_quantised else made:
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
