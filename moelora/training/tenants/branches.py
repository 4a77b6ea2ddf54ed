"""Tells whose loss a backward has failed in, by the nodes that only this loss reaches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from heapq import heappop, heappush
from typing import Any

from torch import Tensor

from moelora.operators.torch_private import sequence_number

NODES = 64  # watched nodes per loss: graphs of losses that share nothing are whole models


class Branches:
    """Watches the backward of losses, from their ends to the first node that two of them share."""

    def __init__(self, losses: Mapping[str, Tensor]) -> None:
        own = _own_nodes(losses)
        self._names = [name for _, name in own]
        self._finished: set[int] = set()
        # By number: a hook that had a node would keep the graph alive.
        self._hooks = [
            node.register_hook(partial(_add, self._finished, i)) for i, (node, _) in enumerate(own)
        ]

    def failed(self) -> str | None:
        """The loss in whose own part a backward raised; None: a shared part, or not known."""
        left = (name for i, name in enumerate(self._names) if i not in self._finished)
        return next(left, None)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _own_nodes(losses: Mapping[str, Tensor]) -> list[tuple[Any, str]]:
    """Nodes and their owners in the order of the backward: the latest of the forward is first."""
    owners: dict[Any, set[str]] = {}
    waiting: list[tuple[int, int, Any]] = []

    def reach(node: Any, name: str) -> None:
        if node is None or not node.next_functions:  # a leaf, which runs at any time
            return
        if node not in owners:
            owners[node] = set()
            heappush(waiting, (-sequence_number(node), len(owners), node))
        owners[node].add(name)

    for name, loss in losses.items():
        reach(loss.grad_fn, name)
    found: list[tuple[Any, str]] = []
    while waiting and len(found) < NODES * len(losses):
        node = heappop(waiting)[2]
        if len(owners[node]) > 1:
            break
        (name,) = owners[node]
        found.append((node, name))
        for further, _ in node.next_functions:
            reach(further, name)
    return found


def _add(finished: set[int], number: int, *_: object) -> None:
    finished.add(number)
