"""Full-depth models without weights, and adapters for them."""

import json
import pathlib
import sys
from dataclasses import asdict, dataclass, replace

from benchmarks.engines import engine_model, vllm_gpt_oss, vllm_quantize
from benchmarks.engines.engine_model import PRESETS, save_tokenizer

RANKS = (16, 64, 16, 64)


@dataclass(frozen=True)
class Model:
    """`vocab`: tokens; `shape`: of a Qwen3-MoE, None: a gpt-oss of so many layers."""

    layers: int
    vocab: int
    shape: engine_model.Shape | None = None


MODELS = {
    "qwen3-30b-a3b": Model(48, 151936, PRESETS["a3b"]),
    "gpt-oss-20b": Model(24, 201088),
    "tiny": Model(4, 4096, PRESETS["tiny"]),
    "micro": Model(2, 4096, PRESETS["micro"]),
}


QUANTIZED = {  # quantization_config of a checkpoint whose experts are quantized
    "bf16": None,
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "int4": vllm_quantize.settings("int4", 0),
    "nvfp4": vllm_quantize.settings("nvfp4", 0),
    "mxfp4": None,  # gpt-oss says it itself
}


def make(name, format, folder, layers=None):
    """Write a model and its adapters; returns (folder of the model, {adapter: folder}, whether it
    has weights)."""
    model = MODELS[name]
    model = replace(model, layers=layers or model.layers)
    if (model.shape is None) != (format == "mxfp4"):
        raise ValueError(f"--format is {format}, {name} has {'' if model.shape else 'only '}mxfp4")
    base, ranks = folder / "base", sorted(set(RANKS))
    if model.shape is None:
        words = ["--out", str(folder), "--layers", str(model.layers), "--only-quantized"]
        vllm_gpt_oss.main(
            [*words, "--ranks", ",".join(map(str, ranks)), "--vocab", str(model.vocab)]
        )
        written = json.loads((folder / "manifest.json").read_text())["adapters"]
    else:
        shape = replace(model.shape, layers=model.layers)
        base.mkdir(parents=True)
        config = engine_model.settings(shape) | {"vocab_size": model.vocab}
        if quantized := QUANTIZED[format]:
            config["quantization_config"] = quantized
        (base / "config.json").write_text(json.dumps(config, indent=1))
        make, written = engine_model.Maker(engine_model.device()), []
        for rank in ranks:
            written.append(folder / f"r{rank}")
            engine_model.save_adapter(written[-1], *engine_model.adapter(make, shape, rank))
    save_tokenizer(base, model.vocab)
    folders = dict(zip(ranks, map(pathlib.Path, written), strict=True))
    adapters = {f"a{i}-r{rank}": link(folders[rank], folder, i) for i, rank in enumerate(RANKS)}
    return base, adapters, model.shape is None


def link(written, folder, i):
    """A folder of its own name for adapter number i, since engines tell adapters by their paths."""
    path = folder / f"adapter-{i}"
    path.symlink_to(written)
    return path


def main():
    """In a process of its own, so that the GPU's memory is free afterwards."""
    name, format, folder, layers = sys.argv[1:]
    base, adapters, weights = make(name, format, pathlib.Path(folder), int(layers) or None)
    described = {"base": str(base), "adapters": {k: str(v) for k, v in adapters.items()}}
    shape = MODELS[name].shape
    described |= {"weights": weights, "shape": asdict(shape) if shape else "gpt-oss-20b"}
    (pathlib.Path(folder) / "served.json").write_text(json.dumps(described))


if __name__ == "__main__":
    main()
