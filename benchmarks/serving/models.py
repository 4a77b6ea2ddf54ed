"""Full-depth models without weights, and adapters for them."""

import pathlib
import sys
from dataclasses import replace

from benchmarks.engines.engine_model import GPT_OSS, GPT_OSS_20B, PRESETS, QWEN3, save_json, write
from benchmarks.engines.vllm_quantize import FORMATS, both, settings

MODELS = {  # family, shape, tokens
    "qwen3-30b-a3b": (QWEN3, replace(PRESETS["a3b"], layers=48), 151936),
    "gpt-oss-20b": (GPT_OSS, replace(GPT_OSS_20B, layers=24), 201088),
    "tiny": (QWEN3, PRESETS["tiny"], 4096),
    "micro": (QWEN3, PRESETS["micro"], 4096),
}
QUANTIZED = ("bf16", "fp8", "int4", "nvfp4", "modelopt", "mxfp4")
# `load_format=dummy` draws scales of either sign, and no codes of INT4: four bits have weights.
WITHOUT = ("bf16", "fp8")


def make(name, format, folder, layers=None, ranks=(16, 64), count=4):
    """Write a model and `count` adapters with these ranks in turns; returns (folder of the model,
    {adapter: folder}, whether it has weights)."""
    family, shape, vocab = MODELS[name]
    shape = replace(shape, layers=layers or shape.layers)
    # No layer but experts' is named, so that FP8 is that of all linear layers.
    config = {} if format == "bf16" else {"quantization_config": settings(format, 0)}
    change = None if format in WITHOUT else lambda tensors: both(tensors, FORMATS[format])[0]
    sizes = sorted(set(ranks[:count]))
    base, written = write(folder, family, shape, sizes, vocab, change, **config)
    folders = dict(zip(sizes, written, strict=True))
    (folder / "adapters").mkdir()
    adapters = {}
    for i in range(count):  # engines tell adapters by their paths
        rank = ranks[i % len(ranks)]
        adapters[f"a{i}-r{rank}"] = path = folder / "adapters" / f"a{i}-r{rank}"
        path.symlink_to(folders[rank])
    return base, adapters, change is not None


def main():
    """In a process of its own, so that the GPU's memory is free afterwards."""
    name, format, folder, layers, ranks, count = sys.argv[1:]
    sizes, folder = [int(rank) for rank in ranks.split(",")], pathlib.Path(folder)
    base, adapters, weights = make(name, format, folder, int(layers) or None, sizes, int(count))
    described = {"base": str(base), "adapters": {k: str(v) for k, v in adapters.items()}}
    save_json(folder / "served.json", described | {"weights": weights})


if __name__ == "__main__":
    main()
