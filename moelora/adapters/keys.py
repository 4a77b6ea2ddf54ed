"""Names of tensors in adapters: the module that a factor belongs to, however the file calls it.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight          as PEFT saves it
    module._orig_mod.model.layers.0.self_attn.q_proj.lora_A.default.weight  as it is in memory

Trainers leave more than PEFT's prefix in a key: the modules that torch.compile, DDP, FSDP and
activation checkpointing put around others, and the name of the adapter. `parse` takes all of that
off. What is left is the module's path in the model that was trained, whose classes may call it
otherwise than those of the model that serves it: a text model and the multimodal one that holds it
(`model.layers` and `model.language_model.layers`), old and new releases of transformers
(`block_sparse_moe` and `mlp`), or a trainer's own names (`unembed_tokens` for `lm_head`).
`canonical` gives all of them one name, to look for when there is no module of the exact name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Side = Literal["A", "B"]

MAX_LENGTH = 1024  # characters of a name

PREFIX = ("base_model", "model")  # PEFT's, two modules around the trained one

# Modules that others put around a module, at any depth.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

_FACTOR = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?(?:\.weight)?"
)

# Segments before the first one that says which part of a model is meant.
_HOLDERS = {*PREFIX, "language_model", "text_model", "thinker", "backbone", "llm"}

_SAME = {
    # releases and relatives of the same blocks
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
    # the projections of MLPs and of attention in checkpoints of the makers
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
_ROUTER = re.compile(
    r"\.gate\.(?:gate|layer|linear)(?=\.|$)"
)  # a router whose linear is a module of its
_SHARED = re.compile(r"\.mlp\.shared_experts(?=\.|$)")  # not every model has them inside its MLP


@dataclass(frozen=True)
class Key:
    """The name of one factor, taken apart.

    `path` is the module path as the trained model had it, which `rank_pattern` and
    `alpha_pattern` are matched with; `module` the same without wrappers; `adapter` the adapter's
    name if the key has it.
    """

    text: str
    path: str
    module: str
    side: Side
    embedding: bool
    adapter: str | None


def parse(text: str) -> Key | None:
    """The parts of a factor's name, None for a tensor that is no LoRA factor."""
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{text:.80}... has {len(text)} characters and is not a LoRA factor, wanted at most "
            f"{MAX_LENGTH}"
        )
    match = _FACTOR.fullmatch(text)
    if match is None:
        return None
    module = module_of(match["path"])
    return Key(
        text,
        ".".join(_after_prefix(match["path"].split("."))),
        module,
        "A" if match["side"] == "A" else "B",
        match["embedding"] is not None,
        match["adapter"],
    )


def module_of(path: str) -> str:
    """A module's path in the model that PEFT was given, without wrappers."""
    segments = path.split(".")
    return ".".join(s for s in _after_prefix(segments) if s not in WRAPPERS)


def _after_prefix(segments: list[str]) -> list[str]:
    """The segments behind PEFT's two, among which wrappers may be; all where these are not."""
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
    """One name for what is called differently in several classes of a model."""
    segments = module.split(".")
    while len(segments) > 1 and segments[0] in _HOLDERS:
        segments = segments[1:]
    name = ".".join(_SAME.get(segment, segment) for segment in segments)
    return _SHARED.sub(".shared_experts", _ROUTER.sub(".gate", name))
