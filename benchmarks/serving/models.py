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


def main():
    """Write a model and adapters with these ranks in turns; in a process of its own, so that the
    GPU's memory is free afterwards."""
    name, format, folder, layers, ranks, count = sys.argv[1:]
    family, shape, vocab = MODELS[name]
    shape = replace(shape, layers=int(layers) or shape.layers)
    ranks, folder = [int(rank) for rank in ranks.split(",")], pathlib.Path(folder)
    config = {} if format == "bf16" else {"quantization_config": settings(format, 0)}
    change = None if format in WITHOUT else lambda tensors: both(tensors, FORMATS[format])[0]
    base, written = write(folder, family, shape, sorted(set(ranks)), vocab, change, **config)
    folders = dict(zip(sorted(set(ranks)), written, strict=True))
    (folder / "adapters").mkdir()
    adapters = {}
    for i in range(int(count)):
        rank = ranks[i % len(ranks)]
        path = folder / "adapters" / f"a{i}-r{rank}"  # engines tell adapters by their paths
        path.symlink_to(folders[rank])
        adapters[path.name] = str(path)
    described = {"base": str(base), "adapters": adapters, "weights": change is not None}
    save_json(folder / "served.json", described)


if __name__ == "__main__":
    main()
