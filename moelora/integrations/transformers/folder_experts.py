"""Experts of a folder: both projections of a layer, from tensors of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moelora.integrations.transformers import dense
from moelora.integrations.transformers.folder import Folder, log
from moelora.integrations.transformers.names import OF_ONE, Linears
from moelora.integrations.transformers.projection import (
    Experts,
    expert_weights,
    is_interleaved,
    is_quantized,
    sizes,
    up_name,
)
from moelora.integrations.transformers.scheme import Scheme
from moelora.operators.checks import dtype_name, errors_about
from moelora.weights import QuantizedWeights
from moelora.weights.fp8 import Activations
from moelora.weights.readers import GateUp
from moelora.weights.rounding import Rounding

Names: TypeAlias = list[list[str]]  # of linear layers, by expert: gate and up, or one
Projections: TypeAlias = tuple[QuantizedWeights | Tensor, QuantizedWeights | Tensor]


@dataclass(frozen=True)
class LayerOfFolder:
    """The experts of one layer in a folder.

    Attributes
    ----------
    layer : str
        Name of the experts module in the model.
    linears : dict
        What `expert_linears` has found for it.
    activations : {"fp8", "native", "bf16"}, optional
        Of FP8 weights, None: as the folder says.
    dequantize : bool
        Both projections become tensors (E, N, K) if no kernel reads the scheme of one, with rows of
        gate and up in the module's order.
    rounding : optional
        What 16-bit experts are rounded to, one by one.
    """

    folder: Folder
    layer: str
    experts: Experts
    linears: Linears
    activations: Activations | None = None
    dequantize: bool = False
    rounding: Rounding | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The parameters of both projections."""
        return up_name(self.experts), "down_proj"

    def places(self, own: str) -> int:
        """Linear layers of one expert in a projection: gate and up, or one."""
        return 1 + (self.experts.has_gate and own != "down_proj")

    def gate_up(self, own: str) -> GateUp | None:
        """The order of rows in the module."""
        if self.places(own) == 1:
            return None
        return "interleaved" if is_interleaved(self.experts) else "concatenated"

    def read(self, dtype: torch.dtype) -> Projections:
        """Both projections; `dtype` is that of activations, or of dequantized weights.

        Holds the tiles, one projection's tensors in the checkpoint's format (gate and up
        concatenated), and one expert being packed; no weight is dequantized without `dequantize`.

        Raises
        ------
        ValueError
            A tensor is missing, unknown, or does not match the model or the format. The message
            names it.
        NotImplementedError
            A scheme that no kernel has.
        """
        try:
            shapes = dict(zip(self.names, sizes(self.experts), strict=True))
            read = self._reader(shapes)
            up, down = (read(own, shape, dtype) for own, shape in shapes.items())
            self._refuse_others()
        except ValueError as error:
            at = "" if str(error).startswith(str(self.folder.path)) else f"{self.folder.path}: "
            raise ValueError(f"{at}{error}") from None
        return up, down

    def _reader(
        self, shapes: Mapping[str, torch.Size]
    ) -> Callable[[str, torch.Size, torch.dtype], QuantizedWeights | Tensor]:
        """The method that reads each projection, by its name, shape and dtype."""
        if self.rounding is not None:
            return self._rounded
        if is_interleaved(self.experts):
            self._refuse_halves()
        if self.folder.quantization.get("quant_method") == "mxfp4":
            return self._stacked
        if f"{self.layer}.{up_name(self.experts)}.absmax" in self.folder:
            if self.activations is not None:
                raise ValueError(
                    f"activations is {self.activations!r}, wanted None: weights are not FP8"
                )
            return self._stack_of_bnb
        names = {own: self._names(own, shape[0]) for own, shape in shapes.items()}
        schemes = {own: self._scheme(of_own) for own, of_own in names.items()}
        plain = all(scheme.dequantize_weight is dense.plain for scheme in schemes.values())
        if plain or (self.dequantize and any(scheme.make is None for scheme in schemes.values())):
            return partial(self._dequantized, names)
        return partial(self._per_expert, names, schemes)

    def _stack_of_bnb(self, own: str, shape: torch.Size, dtype: torch.dtype) -> QuantizedWeights:
        """A parameter that bitsandbytes has replaced (`nn.parametrize`): statistics are called
        after it."""
        name = f"{self.layer}.{own}"
        if self.experts.is_transposed:
            raise NotImplementedError(
                f"{self.folder.path}: {name} is stored (E, K, N), so that blocks of bitsandbytes "
                "run along rows, which no kernel reads; load a folder of 16 bits with experts='nf4'"
            )
        parts = (key for key in self.folder if key.startswith(f"{name}."))
        state = {key.removeprefix(f"{name}."): self.folder[key] for key in parts}
        with errors_about(name, ValueError):
            weights = QuantizedWeights.from_bnb(
                self.folder[name], state, gate_up=self.gate_up(own), dtype=dtype
            )
        _check_shape(name, weights, shape)
        return weights

    def _rounded(self, own: str, shape: torch.Size, dtype: torch.dtype) -> QuantizedWeights:
        rounding: Any = self.rounding
        gate_up, name = self.gate_up(own), self.folder.stack(self.layer, own)
        if name is not None:
            stack, transposed = self.folder.experts_of(name), self.experts.is_transposed
            each = OneByOne(self.folder, name, shape, stack, transposed)
        else:
            each = OneByOne(self.folder, self._names(own, shape[0]), shape)
            gate_up = gate_up and "concatenated"
        kinds: dict[str, Any] = {"dtype": dtype, "activations": self.activations or "native"}
        with errors_about(f"{self.layer}.{own}", ValueError):
            weights = QuantizedWeights.from_dense(each, rounding, gate_up=gate_up, **kinds)
        return replace(weights, gate_up=self.gate_up(own))

    def _refuse_halves(self) -> None:
        """NotImplementedError of folders whose gate_proj and up_proj are halves of rows in turns.

        GPTQModel (7.7, defuser 0.0.28) cuts gpt-oss's experts so: each half has rows of both.
        """
        meta = self.folder.quantization.get("meta")
        tools = meta.get("quantizer") if isinstance(meta, dict) else None
        if isinstance(tools, list) and any(str(tool).startswith("gptqmodel") for tool in tools):
            raise NotImplementedError(
                f"{self.folder.path}: {self.layer} has rows of gate and up in turns, which "
                "GPTQModel cuts in halves and calls gate_proj and up_proj; quantize such models "
                "with llm-compressor or AutoRound"
            )

    def _refuse_others(self) -> None:
        """Raises ValueError if tensors of these experts were not used."""
        folder, parameters = self.folder, self.experts._parameters
        places = {self.layer, *(linear.rsplit(".", 2)[0] for linear in self.linears.values())}
        names = self.linears.items()
        biases = {f"{linear}.bias" for (own, *_), linear in names if f"{own}_bias" in parameters}
        for name in sorted(folder.unread):
            place = next((p for p in places if name.startswith(f"{p}.")), None)
            if place is None or name in biases or name.removeprefix(f"{place}.") in parameters:
                continue  # a bias
            if name.endswith(".bias") and not folder[name].float().any():
                continue  # zero bias of linear layers without one, in older GPTQ checkpoints
            method = folder.quantization.get("quant_method")
            raise ValueError(f"{name} is no tensor that {method} has in experts like these")

    def biases(self) -> dict[str, Tensor]:
        """Biases (E, N) stored per expert in a folder, by the names of their parameters."""
        found = {}
        for own in self.names:
            bias, places = self.experts._parameters.get(f"{own}_bias"), self.places(own)
            if bias is None or f"{self.layer}.{own}_bias" in self.folder:
                continue
            count, rows = bias.shape
            keys = [[(own, place, expert) for place in range(places)] for expert in range(count)]
            names = [[f"{self.linears.get(key)}.bias" for key in row] for row in keys]
            each = [[self.folder[name] for name in row if name in self.folder] for row in names]
            for expert, row in enumerate(each if any(each) else ()):
                if [part.shape for part in row] != [(rows // places,)] * places:
                    wanted = f"{places} of {rows // places} numbers"
                    raise ValueError(
                        f"{self.folder.path}: the biases of expert {expert} of "
                        f"{self.layer}.{own} are missing or of another shape, wanted {wanted}"
                    )
            if any(each):
                found[f"{own}_bias"] = torch.stack([self._in_order(own, row) for row in each])
        return found

    def _in_order(self, own: str, parts: list[Tensor]) -> Tensor:
        """Rows of gate and up in the module's order; those of other projections as they are."""
        if self.gate_up(own) == "interleaved":
            return torch.stack(parts, 1).flatten(0, 1)
        return torch.cat(parts)

    def _stacked(self, own: str, shape: torch.Size, dtype: torch.dtype) -> QuantizedWeights:
        name = f"{self.layer}.{own}"
        blocks, scales = self.folder[f"{name}_blocks"], self.folder[f"{name}_scales"]
        _check_shape(f"{name}_blocks", blocks, (*shape[:2], shape[2] // 32, 16))
        with errors_about(name, ValueError):
            return QuantizedWeights.from_mxfp4(
                blocks, scales, gate_up=self.gate_up(own), dtype=dtype
            )

    def _names(self, own: str, count: int) -> Names:
        """The linear layers of one projection, per expert: gate and up, or one."""
        names = []
        for expert in range(count):
            row = [self.linears.get((own, place, expert)) for place in range(self.places(own))]
            if None in row:
                some = next((name for name in self.folder.linears if OF_ONE.search(name)), None)
                has = f"experts are called {some}" if some else "none is of an expert"
                raise ValueError(
                    f"no quantized linear layer is {own} of expert {expert} of {self.layer}; {has}"
                )
            names.append([name for name in row if name is not None])
        return names

    def _per_expert(
        self,
        of_names: Mapping[str, Names],
        schemes: Mapping[str, Scheme],
        own: str,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> QuantizedWeights:
        folder, names = self.folder, of_names[own]
        scheme = schemes[own].taking(self.activations)
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
        gate_up = self.gate_up(own)
        weights = scheme.pack(where, found, gate_up and "concatenated", dtype)
        _check_shape(where, weights, shape)
        return replace(weights, gate_up=gate_up)  # both fill whole tiles, in any order

    def _scheme(self, names: Names) -> Scheme:
        """The common scheme of all experts of a projection."""
        scheme = self.folder.scheme_of(names[0][0])
        for linear in (linear for row in names for linear in row):
            other = self.folder.scheme_of(linear)
            if (other.name, other.options) != (scheme.name, scheme.options):
                raise NotImplementedError(
                    f"{self.folder.path}: {linear} is {other.name} {other.options}, and "
                    f"{names[0][0]} {scheme.name} {scheme.options}; experts of one layer must be "
                    "of one scheme"
                )
        return scheme

    def _dequantized(
        self, of_names: Mapping[str, Names], own: str, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Dequantizes to (E, N, K), one expert at a time."""
        weights = torch.empty(shape, dtype=dtype)
        for expert, row in enumerate(of_names[own]):
            found = [self.folder.dequantized(linear, dtype)[0] for linear in row]
            for linear, weight in zip(row, found, strict=True):
                _check_shape(linear, weight, (shape[1] // len(row), shape[2]))
            weights[expert] = self._in_order(own, found)
        return weights


def _check_shape(name: str, weights: QuantizedWeights | Tensor, shape: Sequence[int]) -> None:
    if tuple(weights.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(weights.shape)}, wanted {tuple(shape)}")


@dataclass(frozen=True, eq=False)
class OneByOne(Sequence[Tensor]):
    """(N, K) of each expert, read when it is asked for: from a stack, or from its own layers."""

    folder: Folder
    names: str | list[list[str]]
    shape: torch.Size
    stack: Any = None  # what `experts_of` returns for one name
    transposed: bool = False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: Any) -> Tensor:  # type: ignore[override] # no slices
        wanted = tuple(self.shape[1:])
        if self.stack is None:
            names = self.names[expert]
            one = torch.cat([self.folder[f"{name}.weight"] for name in names])
            where = " and ".join(names)
        else:
            where, stored = f"{self.names}[{expert}]", tuple(self.stack.get_shape())
            whole = (self.shape[0], *(wanted[::-1] if self.transposed else wanted))
            if stored != whole:
                raise ValueError(f"{self.names} has shape {stored}, wanted {whole}")
            one = self.stack[expert]
            one = one.t().contiguous() if self.transposed else one
        _check_shape(where, one, wanted)
        return one


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
