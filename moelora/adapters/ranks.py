"""Processes that hold parts of one model's adapters, and change them together.

Each of them makes the same calls in the same order. What could differ (a folder, a rank pattern, a
version) is compared before it is used, so that an error of one rank is raised by all.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from moelora.adapters.layers import Adapter, LinearPair, Pair

P = ParamSpec("P")
T = TypeVar("T")


class Ranks:
    """Compares what the processes of a model are about to do.

    Parameters
    ----------
    ranks : sequence of int
        Global ranks of the processes, this one among them. All make this object at the same time.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)
        # Words are exchanged on the host, so that no stream of a GPU waits.
        self._group = torch.distributed.new_group(
            self.ranks, backend="gloo", use_local_synchronization=True
        )

    def together(
        self, call: str, function: Callable[[], T], facts: Callable[[T], Mapping[str, object]]
    ) -> T:
        """Returns `function()` if it succeeds on all ranks, and its `facts` agree; see `every`."""
        result: list[T] = []

        def both() -> tuple[Mapping[str, object], None]:
            result.append(function())
            return facts(result[0]), None

        self.every(call, both)
        return result[0]

    def every(self, call: str, function: Callable[[], tuple[Mapping[str, object], T]]) -> list[T]:
        """Returns the values of all ranks, in their order; `function` returns facts and a value.

        Facts are compared with those of the same name on other ranks. Raises what `function`
        raises; RuntimeError if another rank's fails, or a fact differs. `function` may call
        `every` itself: what that raises, all ranks know already.
        """
        failure: Exception | None = None
        facts: dict[str, object] = {"call": call}
        value: T | None = None
        try:
            found, value = function()
            facts |= found
        except Exception as error:
            if is_on_all_ranks(error):
                raise
            failure = error
            facts["error"] = f"{type(error).__name__}: {error}"
        every: list[Any] = [None] * len(self.ranks)
        # Sizes of the words are exchanged first.
        torch.distributed.all_gather_object(every, (facts, value), group=self._group)
        failure = failure or self._disagreement(call, [facts for facts, _ in every])
        if failure is not None:
            failure._on_all_ranks = True  # type: ignore[attr-defined] # of ours
            raise failure
        return [value for _, value in every]

    def _disagreement(
        self, call: str, every: Sequence[Mapping[str, object]]
    ) -> RuntimeError | None:
        for rank, words in zip(self.ranks, every, strict=True):
            if "error" in words:
                return RuntimeError(
                    f"{call}: rank {rank} of the parallel model failed: {words['error']}"
                )
        first: dict[str, tuple[int, object]] = {}
        for rank, words in zip(self.ranks, every, strict=True):
            for name, value in words.items():
                other, before = first.setdefault(name, (rank, value))
                if value != before:
                    return RuntimeError(
                        f"{call}: the ranks of a parallel model disagree: {name} is {before} on "
                        f"rank {other} and {value} on rank {rank}; every rank makes the same calls "
                        "in the same order"
                    )
        return None


def is_on_all_ranks(error: Exception) -> bool:
    """Whether all ranks have raised an error together."""
    return getattr(error, "_on_all_ranks", False)


def on_all_ranks(method: Callable[P, T]) -> Callable[P, T]:
    """A method of a pool, whose first argument is a name, that succeeds on all ranks or on none."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        ranks = args[0].ranks  # type: ignore[attr-defined] # an AdapterPool
        if ranks is None:
            return method(*args, **kwargs)
        name = args[1] if len(args) > 1 else kwargs.get("name")
        return ranks.together(  # type: ignore[no-any-return]
            f"{method.__name__} of adapter {name!r}",
            lambda: method(*args, **kwargs),
            lambda result: {"the result": result},
        )

    return call


def facts_of(adapter: Adapter) -> dict[str, object]:
    """What ranks compare of an adapter: the rank and scaling of every layer, and its values."""
    ranks: dict[str, object] = {
        f"rank and scaling of {name}.{projection}": (pair.rank, tuple(pair.scalings))
        for name, pairs in adapter.experts.items()
        for projection, pair in pairs.items()
    }
    for name, linear in adapter.linears.items():
        ranks[f"rank and scaling of {name}"] = linear.rank, linear.scaling
    every: list[Pair | LinearPair] = [*adapter.linears.values()]
    every += [pair for pairs in adapter.experts.values() for pair in pairs.values()]
    checksum = 0
    for factors in every:
        for factor in (factors.a, factors.b):
            host = factor.detach().cpu().contiguous()
            checksum = zlib.crc32(host.view(torch.uint8).numpy().data, checksum)
    return {"the set of layers": sorted(ranks), **ranks, "the checksum of factors": checksum}
