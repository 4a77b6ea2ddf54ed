"""Small checkpoint folders whose attention is quantized, too, as quantizers write them.

By hand, for the tools need environments of their own (tests/quantizers makes folders with them):
settings are those of the releases that folder_linears.py names, of GPTQModel in
`quantization/config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import quantized
import quantized_folders
import torch
from folder_linears import (
    GROUP,
    Made,
    awq,
    bnb,
    bnb_int8,
    fp8_blocks,
    fp8_rows,
    fp8_whole,
    gptq,
    int8_rows,
    mxfp4,
    mxfp8,
    nvfp4,
    nvfp4_of_modelopt,
    packed,
    packed_in_order,
    unquantized,
    with_input_scale,
    without_g_idx,
)
from hf_models import assert_logits, transformers
from quantized_folders import COMMON
from safetensors.torch import load_file, save_file
from torch import Tensor

import moelora.integrations.transformers as moelora_hf

TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = "model.layers.0.mlp.experts"
IDS = torch.randint(2, 128, (6, 9), generator=torch.Generator().manual_seed(3))
Quantize = Callable[[Tensor], Made]


def group(form: str, targets: list[str], **weights) -> dict:
    """One of compressed-tensors' config_groups."""
    inputs = weights.pop("inputs", None)
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    if args["strategy"] == "group":
        args.setdefault("group_size", GROUP)
    args.setdefault("group_size", None)
    return {"format": form, "targets": targets, "weights": args, "input_activations": inputs}


def compressed(*groups: dict, **more) -> dict:
    forms = {one["format"] for one in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": one for i, one in enumerate(groups)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **more,
    }


@dataclass(frozen=True)
class Case:
    """A scheme: of experts, of attention (None: plain), and what config.json says."""

    experts: Quantize
    attention: Quantize | None
    config: dict
    refusal: str = ""  # "" where it loads
    dequantized: bool = False  # whether `dequantize` loads what is refused
    head: bool = False  # lm_head is quantized as attention is
    more: dict[str, Tensor] = field(default_factory=dict)  # tensors beside


def both(quantize: Quantize, config: dict, *more, **options) -> Case:
    """Experts and attention alike."""
    return Case(quantize, quantize, config, *more, **options)


def beside_int4(form: str, **weights) -> dict:
    """Attention of another form than that of the experts."""
    own = group("pack-quantized", ["re:.*experts.*"])
    return compressed(own, group(form, ["re:.*self_attn.*"], **weights))


def of_linears(form: str, **weights) -> dict:
    return compressed(group(form, ["Linear"], **weights))


def auto_round(packing: str, **more) -> dict:
    config = {"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int", "act_bits": 16}
    return {"quant_method": "auto-round", **config, "packing_format": packing, **more}


def modelopt(algorithm: str, **more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
GPTQ_V2 = {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}
AWQ = quantized_folders.settings("awq", GROUP)
OF_FP8 = {"quant_algo": "FP8"}
packed_8, packed_with_zeros = partial(packed, width=8), partial(packed, zero=7)
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float", "inputs": FP8_TOKEN}
FP8_CHANNEL = FP8 | {"strategy": "channel"}
INT8_TOKEN = {"num_bits": 8, "type": "int", "dynamic": True}
INT8 = {"num_bits": 8, "strategy": "channel", "inputs": INT8_TOKEN}
NVFP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16}
OF_32 = {"type": "float", "group_size": 32}
CASES = {
    "gptq": both(gptq, {**GPTQ, "checkpoint_format": "gptq"}),
    "gptq_of_attention": Case(unquantized, gptq, GPTQ),
    "gptq_v2": both(lambda w: gptq(w, 7, offset=0), GPTQ_V2),
    "gptq_attention_of_8_bits_in_order": Case(
        gptq,
        lambda w: gptq(w, 128, 8, order=True),
        {**GPTQ, "format": "gptq", "dynamic": {"+:.*self_attn.*": {"bits": 8, "desc_act": True}}},
    ),
    "awq": both(lambda w: awq(w, 7), AWQ),
    "awq_symmetric": both(awq, AWQ | {"zero_point": False}),
    "auto_round_gptq": both(lambda w: without_g_idx(gptq(w)), auto_round("auto_round:auto_gptq")),
    "auto_round": Case(
        lambda w: without_g_idx(gptq(w, 7, offset=0)),
        lambda w: without_g_idx(gptq(w, 128, 8, offset=0)),
        auto_round("auto_round", sym=False, extra_config={r".*self_attn.*": {"bits": 8}}),
    ),
    "auto_round_awq": both(awq, auto_round("auto_round:auto_awq")),
    "ct_w4a16": both(packed, of_linears("pack-quantized"), head=True),
    "ct_w4a16_asymmetric": both(packed_with_zeros, of_linears("pack-quantized", symmetric=False)),
    "ct_w4a16_w8a16_attention": Case(packed, packed_8, beside_int4("pack-quantized", num_bits=8)),
    "ct_fp8_attention": Case(packed, fp8_rows, beside_int4("float-quantized", **FP8_CHANNEL)),
    "ct_fp8_block": both(fp8_blocks, of_linears("float-quantized", strategy="block", **FP8)),
    "ct_fp8_cache": both(
        fp8_rows,
        compressed(
            group("float-quantized", ["Linear"], **FP8_CHANNEL),
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
        ),
        more={
            f"model.layers.{i}.self_attn.{own}_scale": torch.ones(1) for i in (0, 1) for own in "kv"
        },
    ),
    "ct_mxfp4": both(mxfp4, of_linears("mxfp4-pack-quantized", **OF_32)),
    "ct_int8_attention": Case(packed, int8_rows, beside_int4("int-quantized", **INT8)),
    "ct_nvfp4_attention": Case(packed, nvfp4, beside_int4("nvfp4-pack-quantized", **NVFP4)),
    "modelopt_fp8": both(fp8_whole, modelopt("FP8", ignore=["lm_head"])),
    "modelopt_nvfp4": both(nvfp4_of_modelopt, modelopt("NVFP4", ignore=["lm_head"])),
    "modelopt_mixed": Case(
        nvfp4_of_modelopt,
        fp8_whole,
        modelopt("MIXED_PRECISION", quantized_layers={"model.layers.0.self_attn.q_proj": OF_FP8}),
    ),
    "modelopt_mxfp8": both(
        mxfp8,
        modelopt("MXFP8"),
        "experts are MXFP8 of ModelOpt; no kernel reads FP8 with scales for 32 columns",
        dequantized=True,
    ),
    "modelopt_nvfp4_awq": Case(
        nvfp4_of_modelopt,
        None,
        modelopt("NVFP4_AWQ"),
        "quant_algo of .* is 'NVFP4_AWQ', wanted 'FP8', 'NVFP4', .*; quantize the experts with",
    ),
    "ct_nvfp4": both(nvfp4, of_linears("nvfp4-pack-quantized", **NVFP4)),
    "ct_nvfp4_w4a4": both(
        lambda w: with_input_scale(nvfp4(w)),
        of_linears("nvfp4-pack-quantized", **NVFP4, inputs={"num_bits": 4, "type": "float"}),
    ),
    "ct_w8a16": Case(
        packed_8,
        None,
        of_linears("pack-quantized", num_bits=8),
        r"experts are INT8 \(W8A16\) of compressed-tensors; no kernel reads integers of 8 bits: ",
        dequantized=True,
    ),
    "ct_w8a8": Case(
        int8_rows,
        None,
        of_linears("int-quantized", **INT8),
        r"experts are INT8 \(W8A8\) of compressed-tensors; no kernel reads integers of 8 bits: ",
        dequantized=True,
    ),
    "ct_mxfp8": both(
        mxfp8,
        of_linears("mxfp8-quantized", num_bits=8, **OF_32),
        "experts are MXFP8 of compressed-tensors; no kernel reads FP8 with scales for 32 columns",
        dequantized=True,
    ),
    "gptq_8_bits": Case(
        lambda w: gptq(w, 128, 8),
        None,
        {**GPTQ, "bits": 8},
        "experts are INT8 of GPTQ; no kernel reads integers of 8 bits: quantize the experts to",
        dequantized=True,
    ),
    "gptq_act_order": both(
        lambda w: gptq(w, order=True),
        {**GPTQ, "desc_act": True},
        "experts are INT4 of GPTQ; each expert has its columns in an order of its own",
        dequantized=True,
    ),
    "ct_act_order": Case(
        packed_in_order,
        None,
        of_linears("pack-quantized", actorder="group"),
        r"experts are INT4 \(W4A16\) of compressed-tensors; each expert has its columns in an ord",
        dequantized=True,
    ),
    "auto_round_mxfp4": Case(
        mxfp4,
        None,
        auto_round("auto_round:llm_compressor", data_type="mx_fp", act_bits=4),
        r"experts are mx_fp of 4 bits, activations of 4, of AutoRound \(auto_round:llm_comp",
    ),
    "ct_rotated": Case(
        packed,
        None,
        of_linears("pack-quantized")
        | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        "transform_config rotates activations before a layer, which is not supported",
    ),
    "bnb_nf4": both(bnb, BNB),
    "bnb_fp4": Case(lambda w: bnb(w, "fp4_of_bnb", torch.bfloat16), None, BNB),
    "bnb_nf4_of_attention": Case(unquantized, bnb, BNB),
    "bnb_int8": both(bnb_int8, BNB | {"load_in_8bit": True}, "experts are INT8 of bitsandbytes; "),
    "hqq": Case(packed, None, {"quant_method": "hqq"}, "scales and zero points of HQQ are not rea"),
}
LOADED = [name for name, case in CASES.items() if not case.refusal]
REFUSED = [name for name, case in CASES.items() if case.refusal]
DEQUANTIZED = [name for name, case in CASES.items() if case.dequantized]
SIZES = COMMON | {"intermediate_size": 192}
CONFIGS = {
    "qwen3_moe": SIZES | {"moe_intermediate_size": 192, "num_experts": 4},
    "mixtral": SIZES | {"num_local_experts": 4},
    "minimax_m2": SIZES | {"num_local_experts": 4, "rotary_dim": 32},
    "gpt_oss": SIZES | {"num_local_experts": 4},
}
W_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _expert_name(name: str, kind: str, part: str, own_names: bool) -> str:
    """What a checkpoint calls one projection; `own_names`: as llm-compressor renames those."""
    if kind in ("mixtral", "minimax_m2"):
        name = name.replace(".mlp.", ".block_sparse_moe.")
        part = part if own_names else W_NAMES[part]
    return f"{name}.{part}"


@torch.no_grad()
def make(folder: Path, case: str, kind: str = "qwen3_moe", own_names: bool = False):
    """Writes a folder; returns the model in float32 that has the numbers that it means."""
    made = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".experts.", "lm_head", ".gate.", ".router.", "bias")):
            parameter.normal_(std=0.15)
        parameter.copy_(parameter.bfloat16())
    tensors = dict(made.more)
    for name, parameter in model.state_dict().items():
        where, _, own = name.rpartition(".")
        if where.endswith(".experts"):
            tensors |= _experts(where, own, parameter, kind, made, own_names)
            continue
        is_own = name.endswith("_proj.weight") or (made.head and name == "lm_head.weight")
        if is_own and made.attention is not None:
            found, meant = made.attention(parameter)
            parameter.copy_(meant)
            tensors |= {where + suffix: tensor for suffix, tensor in found.items()}
        else:
            if kind in ("mixtral", "minimax_m2"):
                name = name.replace(".mlp.gate.e_score", ".mlp.e_score")
                name = name.replace(".mlp.", ".block_sparse_moe.")
            tensors[name] = parameter.bfloat16()
    config.architectures = [type(model).__name__]
    config.quantization_config = made.config
    config.save_pretrained(folder)
    del config.quantization_config
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / TENSORS, metadata={"format": "pt"})
    return model.eval()


def _experts(where, own, stack, kind, made, own_names) -> dict[str, Tensor]:
    """Tensors of a stack of experts' weights or biases, in one for each; gpt-oss's lie (K, N)."""
    tensors = {}
    is_bias, interleaved = own.endswith("_bias"), kind == "gpt_oss"
    parts = ["gate_proj", "up_proj"] if own.startswith("gate_up") else ["down_proj"]
    for expert, one in enumerate(stack):
        rows = one if is_bias or not interleaved else one.t()
        for place, part in enumerate(parts):
            if len(parts) == 1:
                mine = rows
            else:
                mine = rows[place::2] if interleaved else rows.chunk(2)[place]
            name = _expert_name(f"{where}.{expert}", kind, part, own_names)
            if is_bias:
                tensors[f"{name}.bias"] = mine.bfloat16()
                continue
            found, meant = made.experts(mine)
            mine.copy_(meant)
            tensors |= {name + suffix: tensor for suffix, tensor in found.items()}
    return tensors


# ---- folders that are changed, refused, loaded and served ----


def change_json(path: Path, change: Callable[[dict], dict | None]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def change_quantization(folder: Path, **changes) -> None:
    """Changes settings of `quantization_config`."""
    change = lambda config: config["quantization_config"].update(changes)  # noqa: E731
    change_json(folder / "config.json", change)


def change_tensors(folder: Path, change: Callable[[dict], dict | None], to: Path | None = None):
    """Writes a folder's tensors, changed, in place or into another folder."""
    state = load_file(folder / TENSORS)
    state = change(state) or state
    save_file({name: t.contiguous() for name, t in state.items()}, (to or folder) / TENSORS)


def put(name: str, value):
    """Replace a tensor by a number, a tensor, or what a function makes of the old one."""
    return lambda t: t | {name: value(t[name]) if callable(value) else torch.as_tensor(value)}


def drop(part: str):
    return lambda t: {name: tensor for name, tensor in t.items() if part not in name}


def split(folder: Path) -> dict[str, str]:
    """Puts a folder's tensors into two files with an index, whose weight_map it returns."""
    state = load_file(folder / TENSORS)
    (folder / TENSORS).unlink()
    names = ("a.safetensors", "b.safetensors")
    weight_map = {name: names[number % 2] for number, name in enumerate(sorted(state))}
    for file in names:
        save_file({n: state[n] for n in state if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def refused(folder: Path, message: str, error: type[Exception] = ValueError, **options) -> str:
    """What `load_quantized` says of a folder or of options that it does not take."""
    with pytest.raises(error, match=message) as raised:
        moelora_hf.load_quantized(folder, **options)
    return str(raised.value)


def stacks(model) -> dict:
    """Experts' weights of all layers by name."""
    layers = moelora_hf.moe_layers(model).items()
    owns = ("gate_up_proj", "down_proj")
    return {f"{name}.{own}": getattr(module, own) for name, (module, _) in layers for own in owns}


def assert_weights(model, exact) -> None:
    """Dense layers bit for bit; experts but for the scale's rounding, then the product's."""
    wanted = exact.state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.pop(name).bfloat16()), name
    is_transposed = model.get_submodule(LAYER).is_transposed
    for name, stack in stacks(model).items():
        if not isinstance(stack, torch.nn.Parameter):  # else dequantized, compared above
            meant = wanted.pop(name)
            meant = meant.transpose(1, 2) if is_transposed else meant
            rtol = 0 if stack.weights.format == "mxfp4" else 2.05 * quantized.BFLOAT16
            torch.testing.assert_close(stack.weights.unpack().float(), meant, rtol=rtol, atol=0)
    assert not [name for name in wanted if "rotary" not in name and "e_score" not in name]


def assert_mixed_batch(folder: Path, exact, adapters: Path, ids: Tensor, **options) -> Tensor:
    """A mixed batch through a folder is what PEFT gives with the numbers that the folder means.

    Logits, the output of each experts layer, and the first token that is generated; returns logits.
    """
    saved = quantized.make_adapters(exact, adapters)
    model, logits, calls = quantized.serve(folder, saved, ids, **options)
    wanted, layers = quantized.with_peft(exact, saved, ids, calls)
    naive, naive_layers = quantized.with_peft(quantized.in_bfloat16(exact), saved, ids, calls)
    assert_logits(logits, wanted, naive)
    for name, layer in layers.items():
        theirs = (naive_layers[name] - layer).abs().max()
        floor = quantized.BFLOAT16 * layer.abs().max()
        assert (calls[name][-1] - layer).abs().max() <= 1.5 * theirs + floor
    texts = model.generate(ids, adapter_names=quantized.ROWS, max_new_tokens=3, do_sample=False)
    assert torch.equal(texts[:, ids.shape[1]], logits[:, -1].argmax(-1))
    return logits
