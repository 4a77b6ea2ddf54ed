"""Full-depth models without weights, and adapters for them."""

import json
import pathlib
import sys
from dataclasses import dataclass, replace

from benchmarks.engines import engine_model, vllm_gpt_oss, vllm_quantize
from benchmarks.engines.engine_model import PRESETS, save_tokenizer


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
    **{name: vllm_quantize.settings(name, 0) for name in ("int4", "nvfp4", "modelopt")},
    "mxfp4": None,  # gpt-oss says it itself
}
# `load_format=dummy` draws scales of either sign, and no codes of INT4: these have weights.
WRITTEN = {name: vllm_quantize.FORMATS[name] for name in ("int4", "nvfp4", "modelopt")}


def make(name, format, folder, layers=None, ranks=(16, 64), count=4):
    """Write a model and `count` adapters with these ranks in turns; returns (folder of the model,
    {adapter: folder}, whether it has weights)."""
    model = MODELS[name]
    model = replace(model, layers=layers or model.layers)
    base, sizes = folder / "base", sorted(set(ranks[:count]))
    if model.shape is None:
        words = ["--out", str(folder), "--layers", str(model.layers), "--only-quantized"]
        vllm_gpt_oss.main(
            [*words, "--ranks", ",".join(map(str, sizes)), "--vocab", str(model.vocab)]
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
        if quantize := WRITTEN.get(format):
            index = engine_model.save_base(
                base, make, shape, model.vocab, lambda t: vllm_quantize.both(t, quantize)[0]
            )
            engine_model.save_index(base, index)
        for rank in sizes:
            written.append(folder / f"r{rank}")
            engine_model.save_adapter(written[-1], *engine_model.adapter(make, shape, rank))
    save_tokenizer(base, model.vocab)
    folders = dict(zip(sizes, map(pathlib.Path, written), strict=True))
    for file in (path / "adapter_config.json" for path in folders.values()):
        config = json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}
        file.write_text(json.dumps(config))
    (folder / "adapters").mkdir()
    adapters = {}
    for i in range(count):  # engines tell adapters by their paths
        rank = ranks[i % len(ranks)]
        adapters[f"a{i}-r{rank}"] = path = folder / "adapters" / f"a{i}-r{rank}"
        path.symlink_to(folders[rank])
    return base, adapters, model.shape is None or format in WRITTEN


def main():
    """In a process of its own, so that the GPU's memory is free afterwards."""
    name, format, folder, layers, ranks, count = sys.argv[1:]
    sizes, folder = [int(rank) for rank in ranks.split(",")], pathlib.Path(folder)
    base, adapters, weights = make(name, format, folder, int(layers) or None, sizes, int(count))
    described = {"base": str(base), "adapters": {k: str(v) for k, v in adapters.items()}}
    (folder / "served.json").write_text(json.dumps(described | {"weights": weights}))


if __name__ == "__main__":
    main()
