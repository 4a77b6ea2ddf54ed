"""Experts of a folder: both projections of a layer, from tensors of linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelora.integrations.transformers import dense
from moelora.integrations.transformers.folder import Folder, log
from moelora.integrations.transformers.names import OF_ONE, Linears
from moelora.integrations.transformers.projection import (
    expert_weights,
    is_quantized,
    sizes,
    up_name,
)
from moelora.integrations.transformers.scheme import Scheme
from moelora.operators.checks import dtype_name
from moelora.weights import QuantizedWeights
from moelora.weights.fp8 import Activations
from moelora.weights.readers import GateUp
from moelora.weights.rounding import Rounding

if TYPE_CHECKING:
    from moelora.integrations.transformers.projection import Experts


def read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    linears: Linears,
    dtype: torch.dtype,
    activations: Activations | None = None,
    dequantize: bool = False,
    rounding: Rounding | None = None,
) -> tuple[QuantizedWeights | Tensor, QuantizedWeights | Tensor]:
    """Both projections of one experts module, called `layer` in the model.

    Holds the tiles, one projection's tensors in the checkpoint's format (gate and up concatenated),
    and one expert being packed; no weight is dequantized. `linears` come from `expert_linears`.
    With `dequantize`, if no kernel reads the scheme of a projection, both are tensors (E, N, K) of
    `dtype`, with rows of gate and up in the module's order. With `rounding`, 16-bit experts are
    rounded to it one by one.

    Raises
    ------
    ValueError
        A tensor is missing, unknown, or does not match the model or the format. The message names
        it.
    NotImplementedError
        A scheme that no kernel has.
    """
    try:
        if rounding is not None:
            return _rounded(folder, layer, experts, linears, dtype, activations, rounding)
        return _read_experts(folder, layer, experts, linears, dtype, activations, dequantize)
    except ValueError as error:
        at = "" if str(error).startswith(str(folder.path)) else f"{folder.path}: "
        raise ValueError(f"{at}{error}") from None


def _read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    linears: Linears,
    dtype: torch.dtype,
    activations: Activations | None,
    dequantize: bool,
) -> tuple[QuantizedWeights | Tensor, QuantizedWeights | Tensor]:
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    if interleaved:
        _refuse_halves(folder, layer)
    up, down = sizes(experts)
    method = folder.quantization.get("quant_method")
    found: tuple[QuantizedWeights | Tensor, QuantizedWeights | Tensor]
    if method == "mxfp4":
        gate_up: GateUp = "interleaved" if interleaved else "concatenated"
        found = (
            _stacked(folder, f"{layer}.{up_name(experts)}", up, gate_up, dtype),
            _stacked(folder, f"{layer}.down_proj", down, None, dtype),
        )
    elif f"{layer}.{up_name(experts)}.absmax" in folder:
        if activations is not None:
            raise ValueError(f"activations is {activations!r}, wanted None: weights are not FP8")
        found = _stacks_of_bnb(folder, layer, experts, interleaved, dtype)
    else:
        of_up = _names(folder, layer, up_name(experts), 1 + experts.has_gate, up[0], linears)
        of_down = _names(folder, layer, "down_proj", 1, down[0], linears)
        rows: GateUp | None = "concatenated" if experts.has_gate else None
        schemes = [_scheme(folder, names) for names in (of_up, of_down)]
        plain = all(scheme.dequantize_weight is dense.plain for scheme in schemes)
        if plain or (dequantize and any(scheme.make is None for scheme in schemes)):
            found = (
                _dequantized(folder, of_up, up, interleaved, dtype),
                _dequantized(folder, of_down, down, False, dtype),
            )
            _refuse_others(folder, layer, experts, linears)
            return found
        first = _per_expert(folder, of_up, up, rows, dtype, activations)
        if interleaved:  # gate and up each fill whole tiles, in either order
            first = replace(first, gate_up="interleaved")
        found = first, _per_expert(folder, of_down, down, None, dtype, activations)
    _refuse_others(folder, layer, experts, linears)
    return found


def _stacks_of_bnb(
    folder: Folder, layer: str, experts: Experts, interleaved: bool, dtype: torch.dtype
) -> tuple[QuantizedWeights, QuantizedWeights]:
    """Parameters that bitsandbytes has replaced (`nn.parametrize`): statistics are called after
    them."""
    made = []
    for own, shape in zip((up_name(experts), "down_proj"), sizes(experts), strict=True):
        name = f"{layer}.{own}"
        if experts.is_transposed:
            raise NotImplementedError(
                f"{folder.path}: {name} is stored (E, K, N), so that blocks of bitsandbytes run "
                "along rows, which no kernel reads; load a folder of 16 bits with experts='nf4'"
            )
        gate_up: GateUp | None = None
        if experts.has_gate and own != "down_proj":
            gate_up = "interleaved" if interleaved else "concatenated"
        state = {
            key.removeprefix(f"{name}."): folder[key]
            for key in folder
            if key.startswith(f"{name}.")
        }
        try:
            weights = QuantizedWeights.from_bnb(folder[name], state, gate_up=gate_up, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if weights.shape != shape:
            raise ValueError(f"{name} has shape {tuple(weights.shape)}, wanted {tuple(shape)}")
        made.append(weights)
    return made[0], made[1]


def _rounded(
    folder: Folder,
    layer: str,
    experts: Experts,
    linears: Linears,
    dtype: torch.dtype,
    activations: Activations | None,
    rounding: Rounding,
) -> tuple[QuantizedWeights, QuantizedWeights]:
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    made = []
    for own, shape in zip((up_name(experts), "down_proj"), sizes(experts), strict=True):
        places = 1 + (experts.has_gate and own != "down_proj")
        gate_up: GateUp | None = "concatenated" if places == 2 else None
        if f"{layer}.{own}" in folder:
            each = OneByOne(folder, f"{layer}.{own}", shape, experts.is_transposed)
            if interleaved and places == 2:
                gate_up = "interleaved"
        else:
            names = _names(folder, layer, own, places, shape[0], linears)
            each = OneByOne(folder, names, shape)
        weights = QuantizedWeights.from_dense(
            each, rounding, gate_up=gate_up, dtype=dtype, activations=activations or "native"
        )
        if interleaved and places == 2:  # gate and up each fill whole tiles, in either order
            weights = replace(weights, gate_up="interleaved")
        made.append(weights)
    _refuse_others(folder, layer, experts, linears)
    return made[0], made[1]


class OneByOne(Sequence[Tensor]):
    """(N, K) of each expert, read when it is asked for: from a stack, or from its own layers."""

    def __init__(
        self,
        folder: Folder,
        names: str | list[list[str]],
        shape: torch.Size,
        transposed: bool = False,
    ) -> None:
        self._folder, self._names, self._shape = folder, names, shape
        self._transposed = transposed
        self._stack = folder.experts_of(names) if isinstance(names, str) else None

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, expert: Any) -> Tensor:  # type: ignore[override] # no slices
        wanted = tuple(self._shape[1:])
        if self._stack is None:
            names = self._names[expert]
            one = torch.cat([self._folder[f"{name}.weight"] for name in names])
            where = " and ".join(names)
        else:
            where = f"{self._names}[{expert}]"
            stored = tuple(self._stack.get_shape())
            whole = (self._shape[0], *(wanted[::-1] if self._transposed else wanted))
            if stored != whole:
                raise ValueError(f"{self._names} has shape {stored}, wanted {whole}")
            one = self._stack[expert]
            one = one.t().contiguous() if self._transposed else one
        if tuple(one.shape) != wanted:
            raise ValueError(f"{where} has shape {tuple(one.shape)}, wanted {wanted}")
        return one


def _refuse_halves(folder: Folder, layer: str) -> None:
    """NotImplementedError of folders whose gate_proj and up_proj are halves of rows in turns.

    GPTQModel (7.7, defuser 0.0.28) cuts gpt-oss's experts so: each half has rows of both.
    """
    meta = folder.quantization.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    if isinstance(tools, list) and any(str(tool).startswith("gptqmodel") for tool in tools):
        raise NotImplementedError(
            f"{folder.path}: {layer} has rows of gate and up in turns, which GPTQModel cuts in "
            "halves and calls gate_proj and up_proj; quantize such models with llm-compressor or "
            "AutoRound"
        )


def say_dequantized(folder: Folder, modules: Iterable[Experts]) -> None:
    """Logs how many experts `dequantize` has turned into parameters, if any."""
    modules = [module for module in modules if not is_quantized(module)]
    schemes = (folder.scheme_of(linear) for linear in folder.linears if OF_ONE.search(linear))
    names = dict.fromkeys(scheme.name for scheme in schemes if scheme.make is None)
    if not (modules and names):
        return
    weights = [w for module in modules for w in expert_weights(module)]
    made = sum(w.numel() * w.itemsize for w in weights if isinstance(w, Tensor))
    kind = dtype_name(modules[0].down_proj.dtype)
    log.warning(
        f"{folder.path}: the experts of {len(modules)} layers ({', '.join(names)}) are dequantized "
        f"to {kind}, {made / 2**30:.2f} GiB"
    )


def _refuse_others(folder: Folder, layer: str, experts: Experts, linears: Linears) -> None:
    """Raises ValueError if tensors of these experts were not used."""
    places = {layer, *(linear.rsplit(".", 2)[0] for linear in linears.values())}
    biases = set(_biases(experts, linears))
    for name in sorted(folder.unread):
        place = next((p for p in places if name.startswith(f"{p}.")), None)
        if place is None or name in biases or name.removeprefix(f"{place}.") in experts._parameters:
            continue  # a bias
        if name.endswith(".bias") and not folder[name].float().any():
            continue  # zero bias of linear layers without one, in older GPTQ checkpoints
        method = folder.quantization.get("quant_method")
        raise ValueError(f"{name} is no tensor that {method} has in experts like these")


def _biases(experts: Experts, linears: Linears) -> dict[str, tuple[str, int, int]]:
    """Names of single experts' biases in a folder, and their places in the module."""
    own = (up_name(experts), "down_proj")
    has = [name for name in own if f"{name}_bias" in experts._parameters]
    return {f"{linear}.bias": key for key, linear in linears.items() if key[0] in has}


def read_biases(
    folder: Folder, layer: str, experts: Experts, linears: Linears
) -> dict[str, Tensor]:
    """Biases (E, N) stored per expert in a folder, by the names of their parameters."""
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, (own, place, expert) in _biases(experts, linears).items():
        if name in folder and f"{layer}.{own}_bias" not in folder:
            parts.setdefault(own, {})[expert, place] = folder[name]
    found = {}
    for own, biases in parts.items():
        shape = getattr(experts, f"{own}_bias").shape
        places = 2 if own == "gate_up_proj" else 1
        rows = []
        for expert in range(shape[0]):
            here = [(expert, place) for place in range(places)]
            row = [biases[key] for key in here if key in biases]
            if [bias.shape for bias in row] != [(shape[1] // places,)] * places:
                wanted = f"{places} of {shape[1] // places} numbers"
                raise ValueError(
                    f"{folder.path}: the biases of expert {expert} of {layer}.{own} are missing or "
                    f"of another shape, wanted {wanted}"
                )
            rows.append(torch.stack(row, -1).flatten() if interleaved else torch.cat(row))
        found[f"{own}_bias"] = torch.stack(rows)
    return found


def _stacked(
    folder: Folder, name: str, shape: torch.Size, gate_up: GateUp | None, dtype: torch.dtype
) -> QuantizedWeights:
    blocks, scales = folder[f"{name}_blocks"], folder[f"{name}_scales"]
    wanted = (*shape[:2], shape[2] // 32, 16)
    if tuple(blocks.shape) != wanted:
        raise ValueError(f"{name}_blocks has shape {tuple(blocks.shape)}, wanted {wanted}")
    try:
        return QuantizedWeights.from_mxfp4(blocks, scales, gate_up=gate_up, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _names(
    folder: Folder, layer: str, own: str, places: int, count: int, linears: Linears
) -> list[list[str]]:
    """The linear layers of one projection, per expert: gate and up, or one."""
    names = []
    for expert in range(count):
        row = [linears.get((own, place, expert)) for place in range(places)]
        if None in row:
            some = next((linear for linear in folder.linears if OF_ONE.search(linear)), None)
            has = f"experts are called {some}" if some else "none is of an expert"
            raise ValueError(
                f"no quantized linear layer is {own} of expert {expert} of {layer}; {has}"
            )
        names.append([name for name in row if name is not None])
    return names


def _per_expert(
    folder: Folder,
    names: Sequence[Sequence[str]],
    shape: torch.Size,
    gate_up: GateUp | None,
    dtype: torch.dtype,
    activations: Activations | None,
) -> QuantizedWeights:
    scheme = _scheme(folder, names).taking(activations)
    experts, _, first = names[0][0].rpartition(".")
    parts = " and ".join([first, *(name.rpartition(".")[2] for name in names[0][1:])])
    where = f"{experts.rpartition('.')[0]}.*.{parts}"
    found: dict[str, list[Any]] = {}
    linears = [linear for row in names for linear in row]
    for linear in linears:
        folder.skip(linear, scheme)
    for part in scheme.parts:
        if part in scheme.required or _has(folder, linears, part):
            rows = ([f"{linear}.{part}" for linear in row] for row in names)
            if scheme.are_apart:
                found[part] = [[folder[name] for name in row] for row in rows]
            else:
                found[part] = [_joined(folder, row, scheme) for row in rows]
    weights = scheme.pack(where, found, gate_up, dtype)
    if weights.shape != shape:
        raise ValueError(f"{where} has shape {tuple(weights.shape)}, wanted {tuple(shape)}")
    return weights


def _has(folder: Folder, linears: Sequence[str], part: str) -> bool:
    """Whether the linear layers have an optional tensor; ValueError if only some do."""
    lacking = [linear for linear in linears if f"{linear}.{part}" not in folder]
    if lacking and len(lacking) < len(linears):
        names = ", ".join(lacking[:4]) + (", ..." if len(lacking) > 4 else "")
        raise ValueError(
            f"{len(lacking)} of {len(linears)} linear layers have no {part}, wanted all or none: "
            f"{names}"
        )
    return not lacking


def _scheme(folder: Folder, names: Sequence[Sequence[str]]) -> Scheme:
    """The common scheme of all experts of a projection."""
    scheme = folder.scheme_of(names[0][0])
    for linear in (linear for row in names for linear in row):
        other = folder.scheme_of(linear)
        if (other.name, other.options) != (scheme.name, scheme.options):
            raise NotImplementedError(
                f"{folder.path}: {linear} is {other.name} {other.options}, and {names[0][0]} "
                f"{scheme.name} {scheme.options}; experts of one layer must be of one scheme"
            )
    return scheme


def _dequantized(
    folder: Folder,
    names: Sequence[Sequence[str]],
    shape: torch.Size,
    interleaved: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantizes to (E, N, K), one expert at a time."""
    weights = torch.empty(shape, dtype=dtype)
    for expert, row in enumerate(names):
        found = [folder.dequantized(linear, dtype)[0] for linear in row]
        wanted = (shape[1] // len(row), shape[2])
        for linear, weight in zip(row, found, strict=True):
            if tuple(weight.shape) != wanted:
                raise ValueError(f"{linear} has shape {tuple(weight.shape)}, wanted {wanted}")
        weights[expert] = torch.stack(found, 1).flatten(0, 1) if interleaved else torch.cat(found)
    return weights


def _joined(folder: Folder, names: Sequence[str], scheme: Scheme) -> Tensor:
    """Concatenates tensors of gate and up to those of one weight, gate's rows first."""
    tensors = [folder[name] for name in names]
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            got, wanted = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, first))
            raise ValueError(f"{name} is {got}, wanted {wanted} as {names[0]}")
    if names[0].endswith(".weight_shape"):
        if tuple(first.shape) != (2,):
            raise ValueError(f"{names[0]} has shape {tuple(first.shape)}, wanted (2,)")
        rows_of, columns_of = torch.stack(tensors).unbind(1)
        if (columns_of != columns_of[0]).any():
            raise ValueError(f"{names[-1]} is {tensors[-1].tolist()}, {names[0]} {first.tolist()}")
        return torch.stack([rows_of.sum(), columns_of[0]])
    is_scale = "scale" in names[0].rpartition(".")[2]
    if is_scale and first.numel() == 1 and "block" not in scheme.options:  # each of a whole tensor
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    if first.dim() == 1:  # g_idx: per column, hence common to both
        for name, tensor in zip(names, tensors, strict=True):
            if not torch.equal(tensor, first):
                raise ValueError(f"{name} is in another order (desc_act), wanted {names[0]}'s")
        return first
    if first.dim() != 2:
        raise ValueError(f"{names[0]} has shape {tuple(first.shape)}, wanted a matrix")
    return torch.cat(tensors, dim=scheme.rows)
