"""Check that PEFT has loaded an adapter completely.

PEFT converts checkpoints to the classes of the loading model. It silently drops factors that match
no module, keeps initial values for modules without factors in the file, and reads columns of
`lora_B` in its own order. So the folder's header and as few tensors as possible are read again, and
compared with the layers that PEFT has wrapped.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import peft
import torch
from peft.tuners.lora import LoraLayer as _LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import PreTrainedModel

from moelora.adapters.config import CONFIG_FILE, LoraConfig
from moelora.adapters.keys import parse
from moelora.adapters.places import ExpertPlace, Modules
from moelora.adapters.weights import open_weights
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.hub import local_folder
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.linears import linear_layers, plain_name
from moelora.operators.checks import check_mapping
from moelora.operators.storage import check_held

Model: TypeAlias = "peft.PeftModel | PreTrainedModel"

# Options of PEFT that do not affect which layers have factors.
ASIDE: dict[str, Any] = {
    "modules_to_save": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "init_lora_weights": True,
}


def base_of(model: Model) -> PreTrainedModel:
    """The transformers model: the one inside PEFT's, or the one whose `load_adapter` was called."""
    if isinstance(model, peft.PeftModel):
        # `get_base_model` asks the active adapter, which may have been deleted.
        tuner = model.base_model
        return cast("PreTrainedModel", tuner.model if isinstance(tuner, BaseTuner) else tuner)
    # An attached model may have lost its last adapter since.
    if not (getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "_moelora_replaced")):
        raise ValueError(
            f"model is a {type(model).__name__} without adapters of PEFT, wanted a PeftModel or a "
            "transformers model after load_adapter"
        )
    return model


@dataclass(frozen=True, eq=False)
class Load:
    """One load of an adapter: its source, and the keys that matched no module."""

    folder: str
    missing: frozenset[str] = frozenset()


def remember(model: nn.Module, name: str, load: Load) -> None:
    """Record the source of an adapter of `model`, also for copies of the model."""
    model.__dict__.setdefault("_moelora_loads", {})[name] = load


def check_folders(folders: Mapping[str, Any] | None, adapters: Container[str]) -> None:
    """Raise for an argument `folders` of `attach` that names other adapters, or no folders."""
    if folders is None:
        return
    check_mapping("folders", folders)
    for name, folder in folders.items():
        if name not in adapters:
            raise ValueError(f"folders names {name!r}, which is none of the model's adapters")
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(f"folders has {folder!r:.80} for {name!r}, wanted a folder")
        found = local_folder(os.fspath(folder), ["adapter_*"], local_files_only=True)
        if not (found / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"folders: {folder} of adapter {name!r} has no {CONFIG_FILE}")


def wrapped_layers(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers that PEFT has wrapped for LoRA, by PEFT's names."""
    for name, module in base.named_modules():
        if isinstance(module, _LoraLayer):
            yield name, module


def load_of(model: nn.Module, name: str) -> Load | None:
    return model.__dict__.get("_moelora_loads", {}).get(name)


@around("load_adapter", peft.PeftModel, PreTrainedModel)
def _remembering(load_adapter: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = load_adapter(self, *args, **kwargs)
    given = inspect.signature(load_adapter).bind(self, *args, **kwargs).arguments
    more = given.get("kwargs", {}) | (given.get("adapter_kwargs") or {})
    source = given.get("model_id", given.get("peft_model_id"))
    if source is not None:
        folder = f"{source}/{more['subfolder']}" if more.get("subfolder") else source
        missing = frozenset(getattr(result, "missing_keys", None) or ())
        remember(self, given.get("adapter_name") or "default", Load(str(folder), missing))
    return result


@around("add_adapter", peft.PeftModel, PreTrainedModel)
def _forgetting(add_adapter: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A new adapter may have the name of one that was deleted."""
    result = add_adapter(self, *args, **kwargs)
    given = inspect.signature(add_adapter).bind(self, *args, **kwargs).arguments
    self.__dict__.get("_moelora_loads", {}).pop(given.get("adapter_name") or "default", None)
    return result


def check(model: Model, name: str) -> None:
    """Raise ValueError if PEFT lacks factors of an adapter, naming them.

    An adapter without a source folder is compared with itself: it is refused if some layers are
    trained and others have B zero, their initial value.
    """
    kept = _kept(base_of(model), name)
    load = load_of(model, name)
    of_file = None if load is None else _read(base_of(model), load.folder)
    if load is None or of_file is None:
        empty = [where for where, (b, _) in kept.items() if not b.any()]
        if empty and len(empty) < len(kept):
            raise ValueError(
                f"adapter {name!r}: {_some(empty)} have B = 0, as before training, others have "
                "not: PEFT has not found their factors; pass folders= to compare with the "
                "adapter's folder"
            )
        return
    dropped = [where for where in of_file.keys if where not in kept]
    if dropped:
        raise ValueError(
            f"adapter {name!r}: PEFT has dropped the factors of {_some(dropped)}, which the folder "
            f"{of_file.folder} has; moelora.integrations.transformers.load_adapters serves them"
        )
    missing = load.missing

    def is_initial(where: str, b: torch.Tensor, key: str) -> bool:
        """Whether the layer's factors differ from those of the file, and matter."""
        return any(k.endswith(key) for k in missing) if b.any() else of_file.is_trained(where)

    if initial := [where for where, (b, key) in kept.items() if is_initial(where, b, key)]:
        raise ValueError(
            f"adapter {name!r}: PEFT has left the factors of {_some(initial)} as they were made, "
            f"not as the folder {of_file.folder} has them; "
            "moelora.integrations.transformers.load_adapters serves those"
        )
    if of_file.order:
        raise ValueError(
            f"adapter {name!r}: {of_file.order}, which PEFT does not know of; "
            "moelora.integrations.transformers.load_adapters reads them"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _kept(base: nn.Module, name: str) -> dict[str, tuple[torch.Tensor, str]]:
    """B and its key in PEFT of the layers that PEFT has wrapped for an adapter; experts by the name
    of their parameter."""
    kept = {}
    for path, module in wrapped_layers(base):
        where = plain_name(path)
        parameter = getattr(module, "parameter_name", "weight")
        if parameter != "weight":
            where = f"{where}.{parameter}"
        if name in module.lora_B:
            b, key = module.lora_B[name].weight, f"{path}.lora_B.{name}.weight"
        elif name in module.lora_embedding_B:
            b, key = module.lora_embedding_B[name], f"{path}.lora_embedding_B.{name}"
        else:
            continue
        check_held(key, b)
        kept[where] = b.detach(), key
    return kept


@dataclass
class _File:
    """Content of a folder: keys of B by layer, or by parameter of experts; column order."""

    folder: Path
    keys: dict[str, list[str]]
    order: str

    def is_trained(self, where: str) -> bool:
        with open_weights(self.folder) as weights:
            return any(bool(weights[key].read().any()) for key in self.keys.get(where, []))


def _read(base: PreTrainedModel, source: str) -> _File | None:
    """Content of a folder for a model; None if it does not exist or is not a PEFT LoRA."""
    try:
        folder = local_folder(source, ["adapter_*"], local_files_only=True)
        raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        lora = LoraConfig.parse(raw | ASIDE)
        with open_weights(folder) as weights:
            keys = list(weights)
    except (OSError, ValueError, TypeError):
        return None
    experts = moe_layers(base)
    linears = linear_layers(base, experts)
    modules = Modules(
        lora,
        [layer for _, layer in experts.values()],
        [linear.layer for linear in linears.values()],
    )
    order = ""
    if not lora.columns.peft_order:
        order = lora.columns.doubt or "columns of lora_B are grouped by expert"
    return _File(folder, _keys_of_b(modules, keys), order)


def _keys_of_b(modules: Modules, keys: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in keys:
        key = parse(text)
        if key is None or key.side != "B":
            continue
        try:
            place = modules.locate(key)
        except ValueError:  # of a module that PEFT supports and moelora does not: a convolution
            continue
        if isinstance(place, ExpertPlace):
            up, down = place.layer.parameters
            where = f"{place.layer.name}.{down if place.projection == 'down' else up}"
        else:
            where = place.linear.name
        found.setdefault(where, []).append(text)
    return found
