"""Parse tensor names of adapters: the module that a factor belongs to, in any dialect.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight          as PEFT saves it
    module._orig_mod.model.layers.0.self_attn.q_proj.lora_A.default.weight  as it is in memory

Besides PEFT's prefix, keys may contain the wrappers of torch.compile, DDP, FSDP and activation
checkpointing, and the name of the adapter; `parse` removes them. The rest is the module's path in
the trained model, whose classes may differ from those of the served model: a text model and the
multimodal one that contains it (`model.layers` and `model.language_model.layers`), old and new
releases of transformers (`block_sparse_moe` and `mlp`), or a trainer's own names (`unembed_tokens`
for `lm_head`). `canonical` maps all of them to one name, which is looked up if there is no module
with the exact name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Side = Literal["A", "B"]

MAX_LENGTH = 1024  # characters

PREFIX = ("base_model", "model")  # PEFT's two modules around the trained one

# Wrapper modules, at any depth.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

_FACTOR = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?(?:\.weight)?"
)

# Leading segments that select a part of a model.
_HOLDERS = {*PREFIX, "language_model", "text_model", "thinker", "backbone", "llm"}

_SAME = {
    # releases and variants of the same blocks
    "block_sparse_moe": "mlp",
    "moe": "mlp",
    "ffn": "mlp",
    "attn": "self_attn",
    "attention": "self_attn",
    "shared_mlp": "shared_experts",
    "share_expert": "shared_experts",
    "shared_expert": "shared_experts",
    "router": "gate",
    "unembed_tokens": "lm_head",
    "word_embeddings": "embed_tokens",
    # projections of MLPs and of attention in the vendors' checkpoints
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "wq_du": "q_proj",
    "wk_dv": "k_proj",
    "wv_dv": "v_proj",
    "wr_du": "r_proj",
    "wo_ud": "o_proj",
}
# A router whose linear layer is a module of its own.
_ROUTER = re.compile(r"\.gate\.(?:gate|layer|linear)(?=\.|$)")
_SHARED = re.compile(r"\.mlp\.shared_experts(?=\.|$)")  # in some models not inside the MLP


@dataclass(frozen=True)
class Key:
    """Name of one factor, parsed.

    `path` is the module path in the trained model, which `rank_pattern` and `alpha_pattern` are
    matched with; `module` the same without wrappers; `adapter` the adapter's name, if the key
    contains it.
    """

    text: str
    path: str
    module: str
    side: Side
    embedding: bool
    adapter: str | None


def parse(text: str) -> Key | None:
    """Parse a factor's name; None if the tensor is not a LoRA factor."""
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{text:.80}... has {len(text)} characters and is not a LoRA factor, wanted at most "
            f"{MAX_LENGTH}"
        )
    if (match := _FACTOR.fullmatch(text)) is None:
        return None
    return Key(
        text,
        ".".join(_after_prefix(match["path"].split("."))),
        module_of(match["path"]),
        "A" if match["side"] == "A" else "B",
        match["embedding"] is not None,
        match["adapter"],
    )


def module_of(path: str) -> str:
    """Path of a module in the model that PEFT was given, without wrappers."""
    segments = path.split(".")
    return ".".join(s for s in _after_prefix(segments) if s not in WRAPPERS)


def _after_prefix(segments: list[str]) -> list[str]:
    """Segments after PEFT's prefix, which may contain wrappers; all if there is no prefix."""
    left = list(PREFIX)
    for number, segment in enumerate(segments):
        if not left:
            return segments[number:]
        if segment == left[0]:
            left.pop(0)
        elif segment not in WRAPPERS:
            return segments
    return segments


def canonical(module: str) -> str:
    """Common name of modules that are named differently in several classes of a model."""
    segments = module.split(".")
    while len(segments) > 1 and segments[0] in _HOLDERS:
        segments = segments[1:]
    name = ".".join(_SAME.get(segment, segment) for segment in segments)
    return _SHARED.sub(".shared_experts", _ROUTER.sub(".gate", name))
