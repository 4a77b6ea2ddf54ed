"""Read a whole adapter from a PEFT folder or a state dict, or refuse it with a reason.

`keys` parses tensor names (prefixes, alternative module names), `places` maps them to experts,
projections and linear layers, `expert_pairs`, `linear_pairs` and `columns` interpret their layout.
Nothing is ignored: factors that belong to no layer of the model are refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from moelora.adapters import columns, expert_pairs, linear_pairs
from moelora.adapters.columns import Layout
from moelora.adapters.config import LoraConfig
from moelora.adapters.expert_pairs import ExpertPairs
from moelora.adapters.factors import Factor, check_dtype, check_rank, check_shape
from moelora.adapters.folders import reading
from moelora.adapters.keys import Key, module_of, parse
from moelora.adapters.layers import Adapter, AdapterInfo, LinearLayer, MoELayer
from moelora.adapters.linear_pairs import LinearPairs
from moelora.adapters.places import PRUNED, ExpertPlace, LinearPlace, Modules, Place
from moelora.adapters.weights import State, Weights, open_weights
from moelora.operators.checks import errors_about
from moelora.operators.storage import check_held

# Returns the weight of a linear layer or embedding of the model, or None if it has no plain one.
Own: TypeAlias = Callable[[str], "torch.Tensor | None"]
T = TypeVar("T")


def load(
    source: str | Path | Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    layers: Sequence[MoELayer],
    linears: Sequence[LinearLayer] = (),
    *,
    max_rank: int | None = None,
    max_linear_rank: int | None = None,
    layout: Layout | None = None,
    own: Own | None = None,
) -> Adapter:
    """Read and check a whole adapter for a model with these layers.

    Parameters
    ----------
    source : path or mapping
        A PEFT folder, or the tensors by name.
    config : mapping, optional
        Content of adapter_config.json, for a state dict; or PEFT's `LoraConfig`.
    layers : sequence of MoELayer
    linears : sequence of LinearLayer
        Other layers that may have factors; by default none, so that their factors are refused.
    max_rank, max_linear_rank : int, optional
        Maximum accepted rank of factors of `layers` and of `linears`.
    layout : {"rank_major", "grouped_by_expert"}, optional
        Column order of `lora_B` of expert stacks, if the adapter does not state it.
    own : callable, optional
        Returns the model's weight for a name of `linears`. PEFT saves the weights of
        embeddings and of `lm_head` next to their factors, as they were in training: they must be
        the model's own, and are refused without this argument.

    Raises
    ------
    ValueError, FileNotFoundError
        The adapter cannot be read, or does not fit these layers; the message names the option,
        key or file.
    """
    columns.check(layout)

    def read(weights: Weights, lora: LoraConfig) -> Adapter:
        reader = _Reader(weights, lora, Modules(lora, layers, linears), layout)
        return reader.read((max_rank, max_linear_rank), own)

    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("a state dict needs config=, the content of adapter_config.json")
        lora = LoraConfig.parse(config)
        return read(State(source), lora)
    check_config(config)
    return _of_folder(source, read)


def check_config(config: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a `config=` beside a folder."""
    if config is not None:
        raise ValueError("config= is for state dicts; a folder has its own adapter_config.json")


def peek(
    folder: str | Path,
    layers: Sequence[MoELayer],
    linears: Sequence[LinearLayer] = (),
    *,
    layout: Layout | None = None,
) -> AdapterInfo:
    """Read the configuration and the names and shapes of a folder, enough to size a pool for it.

    Parameters and errors are those of `load`, but no tensor is read.
    """
    columns.check(layout)

    def read(weights: Weights, lora: LoraConfig) -> AdapterInfo:
        return _Reader(weights, lora, Modules(lora, layers, linears), layout).info()

    return _of_folder(folder, read)


def hint(source: str | Path | Mapping[str, torch.Tensor] | Adapter) -> str:
    """Hint for the message of a refused folder: how to get details."""
    if not isinstance(source, (str, os.PathLike)) or not Path(source).is_dir():
        return ""
    return f"; `moelora adapters {str(source):.200}` says what the adapter is"


def _of_folder(source: str | Path, read: Callable[[Weights, LoraConfig], T]) -> T:
    """What `read` makes of the tensors and the configuration of a folder."""
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__
        raise ValueError(f"source is a {kind}, wanted a folder, or a mapping of tensors by name")

    def opened(folder: Path) -> T:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        lora = LoraConfig.read(folder)
        with open_weights(folder) as weights:
            return read(weights, lora)

    return reading(Path(source), opened)


class _Reader:
    """One adapter. Its header is checked on construction; tensors are read last."""

    def __init__(
        self, weights: Weights, lora: LoraConfig, modules: Modules, layout: Layout | None
    ) -> None:
        self._weights = weights
        self._modules = modules
        self._saved: dict[str, LinearLayer] = {}  # saved weights, by key
        self._finite = False  # all factors are, as `read` has found
        self._places: list[Place] = []
        self._ranks: dict[str, int] = {}
        self._scalings: dict[str, float] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._layouts: dict[str, Layout] = {}  # by parameter
        self._copies: dict[str, str] = {}  # factors under a second name: the first one's
        adapters: dict[str, Key] = {}
        spelled: dict[str, str] = {}
        last: dict[MoELayer, tuple[int, str]] = {}  # expert of each layer, and its key
        for text in sorted(weights):
            if (key := parse(text)) is None:
                self._saved[text] = self._saved_weight(text)
                continue
            if key.adapter is not None:
                adapters.setdefault(key.adapter, key)
            place = modules.locate(key)
            first = spelled.setdefault(text.replace(".moe.experts.", ".experts."), text)
            if first != text:
                self._copies[text] = first
                check_shape(text, weights[text].shape, [weights[first].shape])
                continue
            self._places.append(place)
            if isinstance(place, ExpertPlace) and place.expert is not None:
                last[place.layer] = max(last.get(place.layer, (-1, "")), (place.expert, text))
            self._ranks[text], self._scalings[text] = lora.rank_and_scaling(*place.paths)
            self._shapes[text] = weights[text].shape
            parameter = place.parameter if isinstance(place, ExpertPlace) else None
            if parameter is not None and parameter not in self._layouts:
                with errors_about(text, ValueError):
                    self._layouts[parameter] = lora.columns.of(parameter, layout)
        for layer, (expert, text) in last.items():
            if expert >= layer.num_experts:
                raise ValueError(
                    f"{text}: expert {expert} of {layer.num_experts} experts; the adapter is of "
                    f"{expert + 1} experts, the model has {layer.num_experts}: {PRUNED}"
                )
        if len(adapters) > 1:
            first, second = list(adapters.values())[:2]
            raise ValueError(
                f"{first.text} and {second.text} are of different adapters, wanted one of them"
            )
        if not self._places:
            raise ValueError("the checkpoint holds no tensors")
        wrapped = {
            place: self._shapes[place.key.text]
            for place in self._places
            if isinstance(place, ExpertPlace) and place.parameter is not None
        }
        self._exchanged = expert_pairs.exchanges(wrapped, self._ranks, lora)
        self._places = [place for place in self._places if not self._absent(place)]
        self._of_experts, self._of_linears = ExpertPairs(), LinearPairs()
        for place in self._places:
            text = place.key.text
            shape, rank = self._shapes[text], self._ranks[text]
            if isinstance(place, LinearPlace):
                check_shape(text, shape, linear_pairs.shapes(place, rank))
                self._of_linears.add(place, self._factor(place), shape)
            else:
                forms = expert_pairs.shapes(place, rank, self._exchanged)
                check_shape(text, shape, forms, place.hint(shape, rank))
                self._of_experts.add(place, self._factor(place), self._exchanged)
        self._of_experts.check()
        self._of_linears.check()

    def info(self) -> AdapterInfo:
        fused, shared, rank = True, True, 0
        for place in self._places:
            if isinstance(place, LinearPlace):
                continue
            text = place.key.text
            rank = max(rank, self._ranks[text])
            if place.projection in ("gate", "up"):
                fused = fused and not place.layer.gated
            if (place.key.side == "A") != (place.projection == "down"):
                shape = self._shapes[text]
                unstacked = len(shape) == 2 or shape[0] == 1
                plain = place.expert is None and place.parameter is None
                shared = shared and (place.layer.num_experts == 1 or (plain and unstacked))
        return AdapterInfo(rank, fused, shared, self._of_linears.ranks(), self._of_experts.ranks())

    def read(self, limits: tuple[int | None, int | None], own: Own | None) -> Adapter:
        """Read the adapter, with the ranks of experts and linear layers within `limits`."""
        max_rank, max_linear_rank = limits
        for place in self._places:
            if max_rank is not None and isinstance(place, ExpertPlace):
                check_rank(place.key.text, self._ranks[place.key.text], max_rank)
        for name, rank in self._of_linears.ranks().items():
            if max_linear_rank is not None:
                check_rank(name, rank, max_linear_rank, "max_linear_rank")
        for text, linear in self._saved.items():
            self._check_saved(text, linear, None if own is None else own(linear.name))
        for text, first in self._copies.items():
            if not torch.equal(self._weights[text].read(), self._weights[first].read()):
                raise ValueError(f"{first} and {text} are the same factor, with other numbers")
        if isinstance(self._weights, State):
            keys = [place.key.text for place in self._places]
            self._finite = self._weights.check_together(keys)
        return Adapter(self._of_experts.join(), self._of_linears.join())

    def _factor(self, place: Place) -> Factor:
        text = place.key.text
        rank, scaling = self._ranks[text], self._scalings[text]

        def read() -> torch.Tensor:
            tensor = self._weights[text].read()
            if isinstance(place, LinearPlace):
                return tensor
            order = self._layouts.get(place.parameter or "", "rank_major")
            return expert_pairs.stacked(place, tensor, rank, self._exchanged, order)

        dtype = check_dtype(text, self._weights[text].dtype)
        return Factor(text, dtype, rank, scaling, read, lambda: self._finite)

    def _absent(self, place: Place) -> bool:
        """Whether the factor is an empty one, for a projection that the layer lacks."""
        if isinstance(place, LinearPlace) or not place.absent:
            return False
        if 0 not in self._shapes[place.key.text]:
            raise ValueError(
                f"{place.key.text}: the experts of {place.layer.name} have no gate, wanted an "
                f"empty tensor, got {self._shapes[place.key.text]}"
            )
        return True

    def _saved_weight(self, text: str) -> LinearLayer:
        """Layer of a saved weight; ValueError if the tensor is not one."""
        match = _WEIGHT.fullmatch(text)
        linear = self._modules.linear(module_of(match["path"])) if match else None
        if linear is None:
            why = next((why for part, why in _OTHERS.items() if part in text), None)
            raise ValueError(f"{text:.200} is not a LoRA factor{why or ''}")
        return linear

    def _check_saved(self, text: str, linear: LinearLayer, own: torch.Tensor | None) -> None:
        """Raise ValueError unless a saved weight equals that of the model."""
        rows = (linear.in_features, linear.out_features)
        shape = rows if linear.embedding else rows[::-1]
        stored = self._weights[text]
        if stored.shape != shape:
            raise ValueError(
                f"{text}: the adapter was trained with a weight {stored.shape}, that "
                f"of {linear.name} is {shape}; resize the model's vocabulary to that of training"
            )
        saved = stored.read().cpu()
        if own is None:
            raise ValueError(
                f"{text}: the weight of {linear.name} is saved beside the factors, and that of the "
                "model is not at hand to compare; save without it (save_embedding_layers=False)"
            )
        check_held(f"the weight of {linear.name}", own)
        own = own.detach().cpu()
        if not (torch.equal(saved.to(own.dtype), own) or torch.equal(own.to(saved.dtype), saved)):
            raise ValueError(
                f"{text}: the adapter was trained with another weight of {linear.name} than the "
                "model has; every row of a batch shares that, so merge the adapter into a model of "
                "its own"
            )


_WEIGHT = re.compile(r"(?P<path>.+?)(\.base_layer)?\.weight")

# Kinds of other tensors in adapters, by a part of their name.
_OTHERS = {
    "lora_magnitude_vector": ": DoRA (use_dora) is not supported",
    "trainable_tokens_": ": trained rows of an embedding (trainable_token_indices) are no product",
    "modules_to_save": ": a layer that was trained whole (modules_to_save)",
    ".bias": ": trained biases are not supported",
    ".weight": (
        ": it is the weight of a layer, trained whole (modules_to_save) or none of this model"
    ),
}
