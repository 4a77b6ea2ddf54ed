"""Adapters on quantized experts, in transformers.

    python examples/quantized.py

Makes checkpoint folders as gpt-oss (MXFP4) and quantized Qwen3-MoE models (INT4, FP8, NF4) have,
loads each without ever dequantizing a stack of experts, and serves one batch whose rows carry
different adapters; FP8 experts multiply activations as they are, so that only the weights are
compared. The result is compared with transformers and PEFT with dequantized weights:

- every experts layer for the inputs that it had in that pass, all outputs against float32. The
  bound is half again the largest error of transformers and PEFT in bfloat16, and one rounding of
  the largest output;
- the logits, by the median token of a row, as a router may fall the other way between two nearly
  equal experts. The bound is twice the median error of transformers and PEFT in bfloat16.

Ends with 1 if an error exceeds its bound.
"""

import copy
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from quantized_folders import FP8, make_adapters, make_folder
from transformers.utils import logging

import moelora.integrations.transformers as moelora_hf

CHECKPOINTS = [
    *(("mxfp4", 32), ("gptq", 64), ("compressed-tensors", 32), ("fp8", 128)),
    ("bitsandbytes", 64),
]
ROWS = ["law", "__base__", "code", "poems", "law", "__base__"]
TOKENS = 12
BFLOAT16 = 2.0**-8  # largest relative error of rounding to it


def in_bfloat16(model):
    """A copy, as transformers loads it: buffers, of positions, stay in float32."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16()
    copied.config.dtype = torch.bfloat16
    return copied


def serve(folder: Path, adapters: dict[str, Path], ids: torch.Tensor, activations=None, **options):
    """The model, its logits, and inputs and output of every experts layer."""
    options = {"attn_implementation": "eager", "activations": activations, **options}
    model = moelora_hf.load_quantized(folder, **options)
    moelora_hf.load_adapters(model, adapters)
    calls = {}
    hooks = [
        module.register_forward_hook(lambda _, i, o, name=name: calls.update({name: (*i, o)}))
        for name, (module, _) in moelora_hf.moe_layers(model).items()
    ]
    logits = model(ids, adapter_names=ROWS).logits
    for hook in hooks:
        hook.remove()
    return model, logits, calls


def with_peft(model, adapters: dict[str, Path], ids: torch.Tensor, calls: dict):
    """The same logits and layers by transformers and PEFT, one adapter at a time; in float32."""
    logits = torch.empty(*ids.shape, model.config.vocab_size)
    layers = {name: torch.empty(output.shape) for name, (*_, output) in calls.items()}
    for name in dict.fromkeys(ROWS):
        adapted = copy.deepcopy(model)
        if name in adapters:
            adapted = PeftModel.from_pretrained(adapted, adapters[name]).eval().get_base_model()
        rows = torch.tensor([row == name for row in ROWS])
        tokens = rows.repeat_interleave(ids.size(1))
        logits[rows] = adapted(ids[rows]).logits.float()
        for layer, (hidden, chosen, weights, _) in calls.items():
            inputs = hidden[tokens].to(model.dtype), chosen[tokens], weights[tokens].to(model.dtype)
            layers[layer][tokens] = adapted.get_submodule(layer)(*inputs).float()
    return logits, layers


def largest(tensors) -> float:
    return max(tensor.abs().max().item() for tensor in tensors)


@torch.no_grad()
def check(kind: str, group: int, folder: Path) -> bool:
    exact = make_folder(folder, kind, group)
    adapters = make_adapters(exact, folder / "adapters")
    ids = torch.randint(2, 128, (len(ROWS), TOKENS), generator=torch.Generator().manual_seed(1))
    activations = "native" if kind in FP8 else None
    model, logits, calls = serve(folder, adapters, ids, activations)
    wanted, layers = with_peft(exact, adapters, ids, calls)
    naive, naive_layers = with_peft(in_bfloat16(exact), adapters, ids, calls)

    error = largest(calls[name][-1] - layers[name] for name in layers)
    theirs = largest(naive_layers[name] - layers[name] for name in layers)
    output = largest(layers.values())
    bound = 1.5 * theirs + BFLOAT16 * output
    ours, theirs = ((x - wanted).abs().mean(-1) for x in (logits, naive))  # of each token
    median, median_bound = ours.median(-1).values.max().item(), 2 * theirs.median().item()
    plain = [i for i, row in enumerate(ROWS) if row == "__base__"]
    same = torch.equal(logits[plain], model(ids).logits[plain])

    weights = [module for module, _ in moelora_hf.moe_layers(model).values()]
    weights = [p.weights for m in weights for p in (m.gate_up_proj, m.down_proj)]
    bits = 8 * sum(w.nbytes for w in weights) / sum(w.shape.numel() for w in weights)
    print(
        f"{type(model).__name__}, {kind}, groups of {group}, {bits:.2f} bits per weight\n"
        f"  layers, largest error  {error:.4f}  bound {bound:.4f}  outputs up to {output:.1f}\n"
        f"  logits, median error   {median:.4f}  bound {median_bound:.4f}\n"
        f"  rows without an adapter have the base model's bits: {same}"
    )
    return error <= bound and median <= median_bound and same


def main() -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    good = True
    for kind, group in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            good &= check(kind, group, Path(folder))
    print("as dequantized weights and PEFT:", good)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
