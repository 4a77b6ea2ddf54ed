"""What moelora does with every folder that `make_folders.py` has made: right, or not, and why.

    python check_folders.py OUT [results.json]

A folder is right if each weight is that of the model it was quantized from, but for the rounding
of its scheme, and a batch of mixed adapters generates as it does with those weights in float32.
Writes the matrix of tool, scheme and architecture; ends with 1 if a folder that loads is wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.folder import Folder
from moelora.integrations.transformers.names import OF_ONE

# Largest relative error of a weight, in the norm of a matrix: normal numbers of four bits are a
# tenth away from what they were. Rows or columns of another place are farther away than their size.
BOUND = 0.25
IDS = torch.randint(3, 256, (4, 7), generator=torch.Generator().manual_seed(1))
ROWS = ["one", "__base__", "two", "one"]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def weights_of(model) -> dict[str, torch.Tensor]:
    """All parameters in float32, those of packed experts as the module would store them."""
    found = {name: p.detach().float() for name, p in model.named_parameters()}
    for name, (module, _) in moelora_hf.moe_layers(model).items():
        for own in ("gate_up_proj", "up_proj", "down_proj"):
            if hasattr(getattr(module, own, None), "weights"):
                weight = getattr(module, own).weights.unpack().float()
                found[f"{name}.{own}"] = weight.transpose(1, 2) if module.is_transposed else weight
    return found


@torch.no_grad()
def check(folder: Path, source: Path) -> str:
    """ "right", "refused: why", or "dequantized: why" of what loads with `dequantize` alone.

    "experts as they were": right, and the tool has quantized other layers alone.
    """
    refused = ""
    try:
        model = moelora_hf.load_quantized(folder, attn_implementation="eager")
    except NotImplementedError as refusal:
        refused = str(refusal).replace(f"{folder}: ", "")
    if refused:
        try:
            model = moelora_hf.load_quantized(folder, attn_implementation="eager", dequantize=True)
        except NotImplementedError:
            return f"refused: {refused}"
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", device_map="cpu"
    )
    found = weights_of(model)
    for name, weight in exact.named_parameters():
        rough = error(found[name], weight)
        if rough > BOUND or found[name].shape != weight.shape:
            return f"WRONG: {name} is {rough:.3f} away"
        weight.copy_(found[name])
    with tempfile.TemporaryDirectory() as adapters:
        result = generation(model, exact, Path(adapters))
    if result != "right":
        return result
    if refused:
        return f"dequantized: {refused}"
    return "experts as they were" if Folder(folder).plain_experts else result


def generation(model, exact, folder: Path) -> str:
    """The logits of a mixed batch, held against PEFT on the same weights in float32."""
    names = [n for n, _ in exact.named_parameters() if n.endswith((".experts.down_proj",))]
    last = names[0].rpartition(".")[0].rpartition(".")[2]
    targets = [f"{last}.gate_up_proj", f"{last}.down_proj"]
    folders = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=4, target_parameters=targets, target_modules=["o_proj"])
        wrapped = get_peft_model(exact, config)
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(std=0.1)
        folders[name] = folder / name
        wrapped.save_pretrained(folders[name])
        wrapped.unload()
    wanted = torch.empty(*IDS.shape, exact.config.vocab_size)
    wanted[[1]] = exact(IDS[[1]]).logits.float()
    for name in folders:
        adapted = PeftModel.from_pretrained(exact, folders[name]).eval()
        rows = [i for i, row in enumerate(ROWS) if row == name]
        wanted[rows] = adapted(IDS[rows]).logits.float()
        adapted.unload()
    base = model(IDS).logits
    moelora_hf.load_adapters(model, folders)
    got = model(IDS, adapter_names=ROWS).logits
    model.generate(IDS, adapter_names=ROWS, max_new_tokens=2, do_sample=False)
    if not torch.equal(got[1], base[1]):
        return "WRONG: a row without an adapter is not the base model's"
    # By the median token: routers may fall the other way, and FP8 rounds activations.
    away = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    rough = away.median().item()
    return "right" if rough < 0.15 else f"WRONG: logits are {rough:.3f} away"


def described(folder: Path) -> dict:
    """What a scheme is found by: settings, and the tensors of one projection of an expert."""
    opened = Folder(folder)
    layer = min((name for name in opened.linears if OF_ONE.search(name)), default=None)
    if layer is None:  # experts are not quantized
        return {}
    beside = ("ignore", "targets", "version", "observer", "observer_kwargs", "meta")
    beside += ("block_name_to_quantize",)
    settings = {
        k: v for k, v in opened.quantization.items() if k not in beside and v not in ({}, None)
    }
    return {"settings": settings, "layer": layer, "parts": sorted(opened.linears[layer])}


def main() -> int:
    out = Path(sys.argv[1])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found: dict[str, dict[str, dict]] = {}
    for folder in sorted(out.glob("*/*/*")):
        tool, name, scheme = folder.relative_to(out).parts
        if not folder.is_dir() or tool == "plain":
            continue
        failed = folder / "error.txt"
        if failed.is_file():
            result = f"not made: {failed.read_text().splitlines()[0][:200]}"
        else:
            try:
                result = check(folder, out / "plain" / name)
            except Exception as problem:
                text = str(problem).replace(f"{folder}", "").strip(": ").splitlines()[0]
                result = f"WRONG: {type(problem).__name__}: {text}"
        row = found.setdefault(tool, {}).setdefault(scheme, {"folders": {}})
        row["folders"][name] = result
        if not failed.is_file() and "layer" not in row:
            row |= described(folder)
        print(f"{tool:15} {name:12} {scheme:30} {result}", flush=True)
        if len(sys.argv) > 2:  # as far as it went, if it is cut off
            Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
    rows = [row for schemes in found.values() for row in schemes.values()]
    return int(any(r.startswith("WRONG") for row in rows for r in row["folders"].values()))


if __name__ == "__main__":
    sys.exit(main())
