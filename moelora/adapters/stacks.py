"""Factors of experts in all slots of a pool, and the conversion of a checkpoint's pairs.

R is the largest rank rounded up to 8. Per layer:

    w13_lora_a  one tensor per slice, (max_loras, E or 1, R, K)
    w13_lora_b  one tensor per slice, (max_loras, E,      N, R)   N = I, or 2I with one slice
    w2_lora_a   (max_loras, E,      R, I)
    w2_lora_b   (max_loras, E or 1, K, R)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from moelora.adapters.factors import check_rank, first_not_finite, have_one_a
from moelora.adapters.fits import check_experts
from moelora.adapters.layers import AdapterInfo, MoELayer, Pair, Projection
from moelora.operators.torch_private import foreach_add_, foreach_copy_, foreach_zero_

Factors: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # A (..., r, in), B (..., out, r)
# Checked factors of layers in the dtype of their stacks: one pair per stack, None = zero.
Converted: TypeAlias = dict[str, list[Factors | None]]


class Place(NamedTuple):
    """Device and dtype of a layer's factors; the dtype is that of the layer's activations."""

    device: torch.device
    dtype: torch.dtype


def padded(rank: int) -> int:
    """Round up, since rows of B are 16-byte aligned if their length is a multiple of 8."""
    return -(-rank // 8) * 8


class Conversions:
    """Converts factors to the dtypes of their stacks; ValueError names one that overflows.

    `check` has to be called at the end: it checks factors on a GPU, all at once.
    """

    def __init__(self) -> None:
        self._unchecked: list[tuple[str, torch.Tensor]] = []

    def of(self, where: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        converted = tensor.to(dtype)
        if converted.device.type == "cuda":
            self._unchecked.append((f"{where} overflows {dtype}", converted))
        elif not torch.isfinite(converted).all():
            raise ValueError(f"{where} overflows {dtype}")
        return converted

    def check(self) -> None:
        if (found := first_not_finite([tensor for _, tensor in self._unchecked])) is not None:
            raise ValueError(self._unchecked[found][0])


class Copies:
    """Copies to a slot, collected for a few calls of torch: each may wait for other threads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._zero: list[torch.Tensor] = []
        self._into: list[torch.Tensor] = []
        self._of: list[torch.Tensor] = []
        self._ints: list[torch.Tensor] = []
        self._values: list[int] = []

    def pair(self, a: torch.Tensor, b: torch.Tensor, factors: Factors | None, used: int) -> int:
        """Copy factors, None = zero, into (..., R, in) and (..., out, R); returns their rank.

        `used`: from this rank on a and b are zero already.
        """
        rank, used = 0 if factors is None else factors[0].size(-2), min(used, a.size(-2))
        if rank < used:
            self._zero.append(a.narrow(-2, rank, used - rank))
            self._zero.append(b.narrow(-1, rank, used - rank))
        if factors is not None:
            whole = rank == a.size(-2)
            self._add(a if whole else a.narrow(-2, 0, rank), factors[0])
            self._add(b if whole else b.narrow(-1, 0, rank), factors[1])
        return rank

    def fill(self, into: torch.Tensor, value: int) -> None:
        """Write one integer; `into` has no dimension."""
        self._ints.append(into)
        self._values.append(value)

    def _add(self, into: torch.Tensor, factor: torch.Tensor) -> None:
        self.nbytes += factor.nbytes
        self._into.append(into)
        self._of.append(factor)

    def run(self) -> None:
        """Launch all on the current stream; their order is not defined."""
        if self._ints:
            foreach_zero_(self._ints)
            foreach_add_(self._ints, self._values)
        if self._zero:
            foreach_zero_(self._zero)
        if self._into:
            of = [_expanded(t, into) for t, into in zip(self._of, self._into, strict=True)]
            foreach_copy_(self._into, of, non_blocking=True)


@dataclass
class _Stacks:
    """Factors of one layer, all slots."""

    w13_lora_a: list[torch.Tensor]
    w13_lora_b: list[torch.Tensor]
    w2_lora_a: torch.Tensor
    w2_lora_b: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [*self.w13_lora_a, *self.w13_lora_b, self.w2_lora_a, self.w2_lora_b]


@dataclass(eq=False)
class ExpertStacks:
    """Stacks of all expert layers of a pool.

    `slices` and `shared_outer` are the `w13_slices` and `shared_outer` of `AdapterPool`.
    """

    layers: Mapping[str, MoELayer]
    max_loras: int
    max_rank: int
    places: Mapping[str, Place]
    slices: int
    shared_outer: bool

    def __post_init__(self) -> None:
        self._stacks = {name: self._allocate(layer) for name, layer in self.layers.items()}

    def of(self, name: str) -> _Stacks:
        if name not in self._stacks:
            raise KeyError(f"{name!r} is none of the pool's layers of experts")
        return self._stacks[name]

    def slices_of(self, layer: MoELayer) -> int:
        return self.slices if layer.gated and not layer.interleaved else 1

    def _allocate(self, layer: MoELayer) -> _Stacks:
        e, k, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        device, dtype = self.places[layer.name]
        outer = 1 if self.shared_outer else e
        slices = self.slices_of(layer)
        n = 2 * i // slices if layer.gated else i

        def stack(experts: int, rows: int, columns: int) -> torch.Tensor:
            return torch.zeros(self.max_loras, experts, rows, columns, dtype=dtype, device=device)

        r = padded(self.max_rank)
        return _Stacks(
            [stack(outer, r, k) for _ in range(slices)],
            [stack(e, n, r) for _ in range(slices)],
            stack(e, r, i),
            stack(outer, k, r),
        )

    def check_info(self, info: AdapterInfo) -> None:
        """Refuse a checkpoint whose header shows that its factors of experts do not fit."""
        for name, ranks in info.expert_ranks.items():
            self._check_joined(self.layers[name], ranks)
        if self.shared_outer and info.expert_ranks and not info.shared_outer:
            raise ValueError("factors differ between experts, but the pool has shared_outer=True")

    def _check_joined(self, layer: MoELayer, ranks: Mapping[Projection, int]) -> None:
        """Check the rank of gate and up in one slice, where separate pairs are concatenated."""
        if self.slices_of(layer) == 1 and layer.gated and "gate_up" not in ranks:
            joined = ranks.get("gate", 0) + ranks.get("up", 0)
            try:
                check_rank(f"{layer.name}.gate_up_proj", joined, self.max_rank)
            except ValueError as error:
                two = "" if layer.interleaved else "w13_slices=2 or "
                raise ValueError(
                    f"{error}: its gate and up have an A each, and this pool one of both, of the "
                    f"sum of their ranks; make the pool with {two}max_rank={joined}"
                ) from None

    def stage(
        self, adapter: Mapping[str, Mapping[Projection, Pair]], convert: Conversions
    ) -> tuple[Converted, int, float, bool]:
        """Check an adapter's pairs and convert them; ValueError says what does not fit.

        Returns them with their largest rank, their scaling, and whether gate and up have one A.
        """
        check_experts(adapter, self.layers, self.max_rank)
        scalings = {
            s for pairs in adapter.values() for pair in pairs.values() for s in pair.scalings
        }
        fold = len(scalings) != 1
        factors: Converted = {}
        rank, one_a = 0, True
        for name, pairs in adapter.items():
            layer = self.layers[name]
            if fold:
                pairs = {projection: _folded(pair) for projection, pair in pairs.items()}
            self._check_joined(layer, {projection: pair.rank for projection, pair in pairs.items()})
            slices = _w13_slices(layer, pairs, self.slices_of(layer))
            factors_a = [s and s[0] for s in slices]
            one_a = one_a and have_one_a(factors_a[0], factors_a[-1])
            chosen = [*slices, _factors(pairs.get("down"))]
            factors[name] = []
            for (projection, *stacks), factor in zip(self._named(layer), chosen, strict=True):
                if factor is None:
                    factors[name].append(None)
                    continue
                converted = []
                for side, tensor, into in zip("AB", factor, stacks, strict=True):
                    where = f"lora_{side} of {name}.{projection}"
                    if tensor.size(0) > into.size(1):
                        raise ValueError(
                            f"{where} differs between experts, but the pool has shared_outer=True"
                        )
                    converted.append(convert.of(where, tensor, into.dtype))
                factors[name].append((converted[0], converted[1]))
                rank = max(rank, factor[0].size(1))
        return factors, rank, 1.0 if fold else scalings.pop(), one_a

    def _named(self, layer: MoELayer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, A stack, B stack) of every pair of a layer."""
        s = self._stacks[layer.name]
        w13 = list(zip(s.w13_lora_a, s.w13_lora_b, strict=True))
        names = ["gate_proj", "up_proj"] if len(w13) == 2 else [layer.parameters[0]]
        return [
            *((n, a, b) for n, (a, b) in zip(names, w13, strict=True)),
            ("down_proj", s.w2_lora_a, s.w2_lora_b),
        ]

    def pairs(self, name: str, slot: int) -> list[Factors]:
        """The stacks of a layer in a slot, as `stage` has their factors."""
        # Not under no_grad(): an interrupt as it begins would leave autograd disabled.
        named = self._named(self.layers[name])
        return [(a.detach()[slot], b.detach()[slot]) for _, a, b in named]


def _expanded(factor: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """A factor that all experts share, expanded to all after one copy to the device of `into`."""
    if factor.shape == into.shape:
        return factor
    return factor.to(into.device, non_blocking=True).expand(into.shape)


def _factors(pair: Pair | None) -> Factors | None:
    return None if pair is None else (pair.a, pair.b)


def _folded(pair: Pair) -> Pair:
    """Fold the scaling into B (or into A if only A differs between experts)."""
    scale = torch.tensor(pair.scalings, dtype=torch.float32, device=pair.b.device).view(-1, 1, 1)
    if scale.size(0) in (1, pair.b.size(0)):
        return Pair(pair.a, pair.b.float() * scale, [1.0])
    return Pair(pair.a.float() * scale, pair.b, [1.0])


def _w13_slices(
    layer: MoELayer, pairs: Mapping[Projection, Pair], slices: int
) -> list[Factors | None]:
    """Convert the pairs of gate and up to the layout of the stacks: one pair per slice."""
    if not layer.gated:
        return [_factors(pairs.get("up"))]
    fused = pairs.get("gate_up")
    if slices == 2:
        if fused is None:
            return [_factors(pairs.get("gate")), _factors(pairs.get("up"))]
        gate, up = fused.b.chunk(2, dim=1)
        return [(fused.a, gate), (fused.a, up)]
    if fused is not None:
        return [(fused.a, fused.b)]
    both: tuple[Projection, ...] = ("gate", "up")
    halves = [(n, pairs[p]) for n, p in enumerate(both) if p in pairs]
    return [_joined(layer, halves)] if halves else [None]


def whole_pairs(layer: MoELayer, pairs: Mapping[Projection, Pair]) -> dict[Projection, Pair]:
    """The same adapter as pairs of whole parameters, with one scaling each: what PEFT has.

    A pair of gate and one of up become one of both ranks; scalings that differ between experts, or
    between gate and up, are folded.
    """
    found = {p: pair if len(pair.scalings) == 1 else _folded(pair) for p, pair in pairs.items()}
    halves: tuple[Projection, ...] = ("gate", "up") if layer.gated else ()
    if len({found[p].scalings[0] for p in halves if p in found}) > 1:
        found |= {p: _folded(found[p]) for p in halves if p in found}
    if own := [(n, found.pop(p)) for n, p in enumerate(halves) if p in found]:
        found["gate_up"] = Pair(*_joined(layer, own), own[0][1].scalings)
    return found


def _joined(layer: MoELayer, halves: Sequence[tuple[int, Pair]]) -> Factors:
    """Join pairs of gate (0) and up (1): A and B have the ranks of both, one after the other, and B
    is zero where the rows of one meet the ranks of the other."""
    experts = max(pair.a.size(0) for _, pair in halves)
    rows = max(pair.b.size(0) for _, pair in halves)
    rank = sum(pair.rank for _, pair in halves)
    i = layer.intermediate_size
    a = torch.cat([pair.a.float().expand(experts, -1, -1) for _, pair in halves], dim=1)
    b = torch.zeros(rows, 2 * i, rank, device=a.device)
    start = 0
    for half, pair in halves:
        own = b[:, half::2] if layer.interleaved else b[:, half * i : (half + 1) * i]
        own[:, :, start : start + pair.rank] = pair.b
        start += pair.rank
    return a, b
