"""Adapters as trainers write them: the same factors in every dialect that is met in public.

`draw` makes random factors for all layers of a model, `merge` adds them to a copy of its weights,
and each of `DIALECTS` writes them into a folder in its own names and layouts.
"""

import copy
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moelora.integrations.transformers import moe_layers
from moelora.integrations.transformers.linears import linear_layers

ALPHA = 2  # lora_alpha / r
PREFIX = "base_model.model."


@dataclass
class Drawn:
    """Factors of one adapter: of experts A (E or 1, r, in), B (E or 1, out, r), of all others A
    (r, in), B (out, r); the product is scaled by `ALPHA`."""

    rank: int
    experts: dict
    linears: dict
    layers: dict  # MoELayer by name
    embeddings: set
    routers: set  # linear layers that are parameters of a module


def draw(model, kind, seed=0, rank=4, embeddings=False, chosen=lambda name: True):
    """Random factors of every layer that is served and whose name `chosen` takes.

    kind: "fused" has one A for gate and up, "split" one for each, "shared" splits and shares A of
    gate and up and B of down between experts.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=generator) * 0.2

    found = moe_layers(model)
    layers = {name: layer for name, (_, layer) in found.items()}
    experts, linears = {}, {}
    for name, layer in layers.items():
        if not chosen(name):
            continue
        e = layer.num_experts
        projections = ("gate_up", "down") if kind == "fused" else ("gate", "up", "down")
        experts[name] = {}
        for projection in projections:
            wide, tall = layer.shape(projection)
            one = kind == "shared"
            a = rand(1 if one and projection != "down" else e, rank, wide)
            b = rand(1 if one and projection == "down" else e, tall, rank)
            experts[name][projection] = (a, b)
    others = linear_layers(model, found)
    for name, linear in others.items():
        if linear.refusal or (linear.layer.embedding and not embeddings) or not chosen(name):
            continue
        size = linear.layer
        linears[name] = rand(rank, size.in_features), rand(size.out_features, rank)
    kinds = {name: others[name] for name in linears}
    return Drawn(
        rank,
        experts,
        linears,
        layers,
        {name for name, linear in kinds.items() if linear.layer.embedding},
        {name for name, linear in kinds.items() if _is_router(linear.module)},
    )


def _is_router(module):
    return not isinstance(module, (nn.Linear, nn.Embedding))


def merge(model, drawn):
    """A copy of the model with the adapter in its weights."""
    return merge_state(model, linears(drawn) | per_expert(drawn), ALPHA)


@torch.no_grad()
def merge_state(model, state, scaling):
    """The same of factors by name, with a pair for each expert."""
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for key in state:
        if not key.endswith(("lora_A.weight", "lora_embedding_A")):
            continue
        other = key.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")
        delta = (scaling * state[other] @ state[key]).to(model.dtype)
        name = key.partition(".lora_")[0]
        if name in modules:
            module = modules[name]
            delta = delta.T if "lora_embedding" in key else delta
            module.weight = nn.Parameter(module.weight + delta)
            continue
        name, expert, projection = name.rsplit(".", 2)
        module, n = modules[name], int(expert)
        weight = module.down_proj[n] if projection == "down_proj" else module.gate_up_proj[n]
        weight = weight.T if module.is_transposed else weight
        if projection in ("gate_proj", "up_proj"):
            half = int(projection == "up_proj")
            weight = weight.chunk(2)[half] if module.is_concatenated else weight[half::2]
        weight += delta
    return model


# ---- how factors are spelled ----


def linears(drawn, rename=lambda name: name):
    """Factors of all layers but experts, as PEFT saves them."""
    state = {}
    for name, (a, b) in drawn.linears.items():
        key = rename(name)
        if name in drawn.embeddings:
            state |= {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
        else:
            state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return state


def wrapped(drawn, columns="rank_major", exchanged=False, place=None):
    """Stacks of experts as PEFT's `target_parameters`; `place` renames (layer, projection)."""
    state = {}
    for name, pairs in drawn.experts.items():
        for projection, (a, b) in pairs.items():
            if exchanged:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            e, r, _ = a.shape
            order = (1, 2, 0) if columns == "rank_major" else (1, 0, 2)
            key = f"{name}.base_layer" if projection == "gate_up" else name
            if place is not None:
                key = place(name, projection)
            state[f"{key}.lora_A.weight"] = a.reshape(e * r, -1)
            state[f"{key}.lora_B.weight"] = b.permute(order).reshape(b.size(1), r * e)
    return state


NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}
MIXTRALS = {"gate": "w1", "up": "w3", "down": "w2"}


def per_expert(drawn, form="{layer}.{expert}.{name}", names=NAMES):
    """One pair for each expert."""
    state = {}
    for layer, pairs in drawn.experts.items():
        for projection, (a, b) in pairs.items():
            for expert in range(drawn.layers[layer].num_experts):
                key = form.format(layer=layer, expert=expert, name=names[projection])
                state[f"{key}.lora_A.weight"] = a[expert % a.size(0)]
                state[f"{key}.lora_B.weight"] = b[expert % b.size(0)]
    return state


def stacks(drawn, names=NAMES):
    """All experts of a projection in one tensor, or one for all of them."""
    state = {}
    for layer, pairs in drawn.experts.items():
        for projection, (a, b) in pairs.items():
            key = f"{layer}.{names[projection]}"
            state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return state


PEFTS = {  # what every release writes
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "auto_mapping": None,
    "base_model_name_or_path": "",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}


def _leaves(names):
    return {name.rpartition(".")[2] for name in names}


def parameters(drawn):
    """Targets of an adapter whose experts and routers are parameters."""
    routers = {".".join(name.split(".")[-2:]) for name in drawn.routers}
    stacks = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return {
        "target_modules": sorted(_leaves(set(drawn.linears) - drawn.routers)),
        "target_parameters": [*stacks, *sorted(f"{name}.weight" for name in routers)],
    }


def modules(drawn):
    """Targets of an adapter whose experts and routers are linear layers."""
    return {"target_modules": sorted(_leaves(drawn.linears) | set(NAMES.values()))}


def granite(drawn):
    names = ("input_linear", "output_linear")
    targets = {"target_parameters": [f"block_sparse_moe.{name}.weight" for name in names]}
    return modules(drawn) | targets


UNSLOTH = {"auto_mapping": {"base_model_class": "", "unsloth_fixed": True}}


def save(folder, state, config, drawn, prefix=PREFIX):
    """Writes a folder in PEFT's form."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"lora_alpha": ALPHA * drawn.rank, **config, "r": drawn.rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    state = {prefix + key: tensor.contiguous().clone() for key, tensor in state.items()}
    save_file(state, folder / "adapter_model.safetensors")
    return folder


def rewrite(folder, change=None, **options):
    """Changes the tensors of a folder, in place or for what `change` returns, and its options."""
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if change is not None:
        state = load_file(file)
        state = change(state) or state
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | options))
    return folder


def renamed(pattern, replacement):
    """For `rewrite`: keys in which a regular expression is replaced."""
    return lambda state: {re.sub(pattern, replacement, key): t for key, t in state.items()}


def shards(folder, ending=".safetensors", with_index=True):
    """Splits the file of a folder in two; returns which key is in which."""
    whole, index = folder / "adapter_model.safetensors", {}
    state = load_file(whole)
    whole.unlink()
    for number, keys in enumerate((sorted(state)[::2], sorted(state)[1::2]), 1):
        name = f"adapter_model-{number:05}-of-00002{ending}"
        part = {key: state[key] for key in keys}
        torch.save(part, folder / name) if ending == ".bin" else save_file(part, folder / name)
        index |= dict.fromkeys(keys, name)
    if with_index:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / f"adapter_model{ending}.index.json").write_text(text)
    return index


def _old_block(name):
    return name.replace(".mlp.", ".block_sparse_moe.")


def _granite(name):
    """What GraniteMoE was before transformers 5: modules with a stack as their weight."""
    return name.replace(".mlp.", ".block_sparse_moe.").replace("moe.router", "moe.router.layer")


def _granite_place(name, projection):
    parent = _granite(name).rpartition(".experts")[0]
    return f"{parent}.{'output_linear' if projection == 'down' else 'input_linear'}"


def _tinker(name):
    name = name.replace(".self_attn.", ".attn.")
    return "model.unembed_tokens" if name == "lm_head" else name


def _in_wrappers(state):
    """Keys as they are in a process that trains: compiled, in FSDP, with the adapter's name."""
    renamed = {}
    for key, tensor in state.items():
        key = key.replace(".layers.1.", ".layers.1._checkpoint_wrapped_module.")
        key = key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn._orig_mod.")
        key = key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default.")
        renamed[f"module.{PREFIX}_orig_mod.{key}"] = tensor
    return renamed


def _torch_file(folder):
    whole = folder / "adapter_model.safetensors"
    torch.save(load_file(whole), folder / "adapter_model.bin")
    whole.unlink()


@dataclass(frozen=True)
class Dialect:
    """How one tool writes adapters.

    `spell` gives the state dict of drawn factors, without `prefix`; `finish` changes the folder;
    `layout` is what a reader has to be told.
    """

    what: str
    kind: str
    spell: Callable[[Drawn], Mapping[str, torch.Tensor]]
    config: Mapping = field(default_factory=lambda: PEFTS)
    prefix: str = PREFIX
    targets: Callable[[Drawn], Mapping] = modules
    layout: str | None = None
    embeddings: bool = False
    finish: Callable[[pathlib.Path], object] | None = None

    def draw(self, model, **options):
        return draw(model, self.kind, embeddings=self.embeddings, **options)

    def write(self, folder, drawn):
        config = {**self.config, **self.targets(drawn)}
        folder = save(folder, self.spell(drawn), config, drawn, self.prefix)
        if self.finish is not None:
            self.finish(folder)
        return folder


def _pefts(drawn, **options):
    return linears(drawn) | wrapped(drawn, **options)


_NOW = {**PEFTS, "peft_version": "0.21.2"}
_MODULES = {**PEFTS, "lora_dropout": 0.1, "peft_version": "0.17.1"}
_BRIDGE = {k: v for k, v in PEFTS.items() if k != "layers_to_transform"}


def _of_parameters(what, config=_NOW, columns="rank_major", exchanged=False, **more):
    """Experts are parameters, whose factors PEFT stacks."""

    def spell(drawn):
        return _pefts(drawn, columns=columns, exchanged=exchanged)

    return Dialect(what, "fused", spell, config, targets=parameters, **more)


_GROUPED = {"lora_B_layout": "grouped_by_expert"}
_STACKS = dict.fromkeys(("gate_up_proj", "down_proj"), _GROUPED | {"num_experts": 4})
_DETAIL = {"lora_A_layout": "grouped_by_expert", **_GROUPED, "parameters": _STACKS}
DIALECTS = {
    "peft": _of_parameters(
        "PEFT, `target_parameters` and `target_modules`, embeddings too", embeddings=True
    ),
    "peft-0.18": _of_parameters(
        "PEFT before 0.19: in and out exchanged", _NOW | {"peft_version": "0.18.0"}, exchanged=True
    ),
    "unsloth-rank-major": _of_parameters(
        'Unsloth since 2026.9.6, `lora_B_layout` "rank_major"',
        _NOW | UNSLOTH | {"lora_B_layout": "rank_major"},
    ),
    "unsloth-grouped": _of_parameters(
        'the same, "grouped_by_expert"',
        _NOW | UNSLOTH | _GROUPED | {"unsloth_fused_expert_lora": _DETAIL},
        columns="grouped_by_expert",
    ),
    "unsloth-unmarked": _of_parameters(
        "Unsloth before: refused without `layout=`",
        _NOW | UNSLOTH,
        columns="grouped_by_expert",
        layout="grouped_by_expert",
    ),
    "megatron-bridge": _of_parameters(
        "Megatron-Bridge, folders with stacks: refused without `layout=`",
        _BRIDGE,
        columns="grouped_by_expert",
        exchanged=True,
        layout="grouped_by_expert",
    ),
    "per-expert": Dialect(
        "one pair per expert (transformers 4, ms-swift, LLaMA-Factory), with dropout",
        "split",
        lambda drawn: linears(drawn) | per_expert(drawn),
        _MODULES,
    ),
    "mixtral": Dialect(
        "the same in `block_sparse_moe.experts.N.w1`, `w2`, `w3` (Mixtral, MiniMax-M2)",
        "split",
        lambda drawn: (
            linears(drawn, _old_block)
            | {_old_block(k): v for k, v in per_expert(drawn, names=MIXTRALS).items()}
        ),
        _MODULES,
    ),
    "lists": Dialect(
        "`gate_up_projs.N`, `down_projs.N` (gpt-oss trained in four bits)",
        "fused",
        lambda drawn: linears(drawn) | per_expert(drawn, "{layer}.{name}s.{expert}"),
        _MODULES,
    ),
    "granite": Dialect(
        "`input_linear`, `output_linear`, `router.layer` (GraniteMoE of transformers 4)",
        "fused",
        lambda drawn: linears(drawn, _granite) | wrapped(drawn, place=_granite_place),
        _NOW,
        targets=granite,
    ),
    "stacks": Dialect(
        "stacks of all experts beside plain factors (Megatron's weight synchronization)",
        "split",
        lambda drawn: linears(drawn) | stacks(drawn),
        _MODULES,
        prefix="",
    ),
    "tinker": Dialect(
        "Tinker: `w1`, `w2`, `w3` with shared outer factors, `attn`, `unembed_tokens`",
        "shared",
        lambda drawn: linears(drawn, _tinker) | stacks(drawn, MIXTRALS),
        {},
    ),
    "in-training": Dialect(
        "names of a process that trains: `module.`, `_orig_mod.`, FSDP's, `lora_A.default`",
        "split",
        lambda drawn: _in_wrappers(linears(drawn) | per_expert(drawn)),
        _MODULES,
        prefix="",
    ),
    "multimodal": Dialect(
        "trained in the multimodal class, served in the text model's",
        "fused",
        lambda drawn: {
            key.replace("model.layers.", "model.language_model.layers."): tensor
            for key, tensor in _pefts(drawn).items()
        },
        _NOW,
        targets=parameters,
    ),
    "torch-file": _of_parameters("`adapter_model.bin`", finish=_torch_file),
    "shards": _of_parameters("shards with an index", finish=shards),
}
