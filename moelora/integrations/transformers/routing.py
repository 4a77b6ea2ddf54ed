"""Experts as a sampler chose them, in a trainer's forward: `record_routing`, `replay_routing`.

A router computes scores of all experts and takes the best with `torch.topk`. Within the block of a
router this call is recorded, or answered with experts that were recorded: scores, and all that the
router makes of them (softmax, norms, scaling), stay its own and have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moelora.integrations.transformers.projection import is_experts, no_experts, sizes
from moelora.operators.checks import check_count
from moelora.training import MultiLoraExperts


class Routing:
    """Experts that tokens took, layer by layer, as `record_routing` collects them."""

    def __init__(self, rows: int, layers: int) -> None:
        self._rows = rows
        self._calls: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, layer: int, ids: Tensor) -> None:
        if len(ids) % self._rows:
            raise ValueError(f"rows is {self._rows}, and the forward has {len(ids)} tokens")
        self._calls[layer].append(ids.view(self._rows, -1, ids.size(-1)))

    def ids(self) -> Tensor:
        """All forwards so far, one after the other: (rows, tokens, layers, top_k), int64.
        ValueError if there were none."""
        if not all(self._calls):
            raise ValueError("no forward was recorded")
        return torch.stack([torch.cat(calls, 1) for calls in self._calls], 2)


@contextmanager
def record_routing(model: nn.Module, rows: int) -> Iterator[Routing]:
    """Record the experts of each token of the forwards within, those of `generate` for instance.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Also one of PEFT, or with `MultiLoraExperts`.
    rows : int
        Rows of the batches.

    Raises
    ------
    ValueError
        The model has no experts, or `rows` is not a positive integer; in the forward: the number of
        tokens is not a multiple of `rows`.
    RuntimeError
        In the forward: a router does not choose by one `torch.topk` of all experts.

    Notes
    -----
    Around `replay_routing` it records what the routers chose themselves, within it what was
    replayed. A backward within that repeats forwards (activation checkpointing) records them again.
    """
    check_count("rows", rows)
    blocks = _blocks(model)
    routing = Routing(rows, len(blocks))

    def choose(layer: int, scores: Tensor, own: Tensor) -> Tensor:
        routing.add(layer, own.detach())
        return own

    with _choosing(blocks, choose):
        yield routing


@contextmanager
def replay_routing(model: nn.Module, ids: Tensor | Sequence[Any]) -> Iterator[None]:
    """Tokens of the forwards within take these experts, with the weights of the model's routers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As of `record_routing`.
    ids : Tensor, shape (rows, tokens, layers, top_k), integers; or a sequence
        Experts of each token, -1 where the router chooses itself; tokens at the end that are not
        there are such, too. A sequence has an array (tokens, layers, top_k) of each row, of any
        number of tokens, as vLLM's `routed_experts` of requests. Layers are those with experts,
        or, as vLLM has them, all.

    Raises
    ------
    ValueError
        The model has no experts or another number of layers of them; in the forward: other rows,
        fewer tokens, another top_k, or an expert that there is not. Nothing is computed then.
    RuntimeError
        In the forward, as of `record_routing`.

    Notes
    -----
    Activation checkpointing repeats forwards in the backward: that has to be within, too.
    """
    blocks = _blocks(model)
    if not isinstance(ids, Tensor):
        if not len(ids) or any(row is None for row in ids):
            raise ValueError(
                "ids is empty or has a row that is None, wanted an array for each row: vLLM "
                "returns them under enable_return_routed_experts"
            )
        each = [torch.as_tensor(row) for row in ids]
        if any(row.is_floating_point() or row.shape[1:] != each[0].shape[1:] for row in each):
            got = ", ".join(f"{tuple(row.shape)} of {str(row.dtype)[6:]}" for row in each[:8])
            raise ValueError(f"ids has {got}, wanted integers (tokens, layers, top_k) in each")
        each = [row.long() for row in each]
        ids = nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=-1)
    every = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if ids.dim() == 4 and ids.size(2) == every:
        numbers = [[int(p) for p in name.split(".") if p.isdigit()] for name, *_ in blocks]
        ids = ids[:, :, [number[0] for number in numbers]]
    if ids.dim() != 4 or ids.size(2) != len(blocks) or ids.is_floating_point() or not len(ids):
        raise ValueError(
            f"ids is {tuple(ids.shape)} of {str(ids.dtype)[6:]}, wanted integers (rows, tokens, "
            f"{len(blocks)} layers, top_k)"
        )
    given = ids.long()

    def choose(layer: int, scores: Tensor, own: Tensor) -> Tensor:
        rows, known, _, top_k = given.shape
        tokens = scores.size(0) // rows
        if scores.size(0) % rows or tokens < known or own.size(-1) != top_k:
            raise ValueError(
                f"ids is of {rows} rows of {known} tokens with {top_k} experts each, and the "
                f"forward has {scores.size(0)} tokens with {own.size(-1)} each"
            )
        chosen = given[:, :, layer].to(own.device)
        if bool((chosen >= scores.size(-1)).any()):
            raise ValueError(f"ids has expert {int(chosen.max())} of {scores.size(-1)}")
        rest = nn.functional.pad(chosen, (0, 0, 0, tokens - known), value=-1).view_as(own)
        return torch.where(rest < 0, own, rest)

    with _choosing(blocks, choose):
        yield


class _Choosing(TorchFunctionMode):
    """Answers a router's `torch.topk` of all experts."""

    def __init__(self, choose: Any, experts: int) -> None:
        self.calls, self._choose, self._experts = 0, choose, experts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.dim() != 2 or scores.size(1) != self._experts:
            return found  # of groups of experts
        self.calls += 1
        ids = self._choose(scores, found[1])
        return torch.return_types.topk((scores.gather(1, ids), ids))


@contextmanager
def _choosing(blocks: Sequence[tuple[str, nn.Module, int]], choose: Any) -> Iterator[None]:
    """Within the blocks, `choose(layer, scores, ids)` says which experts a router takes."""
    modes: list[_Choosing] = []

    def enter(layer: int, experts: int, *_: Any) -> None:
        modes.append(_Choosing(partial(choose, layer), experts))
        modes[-1].__enter__()  # type: ignore[no-untyped-call] # of torch

    def leave(name: str, block: nn.Module, args: Any, out: Any) -> None:
        mode = modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if out is not None and mode.calls != 1:
            raise RuntimeError(
                f"{name} called torch.topk of its experts {mode.calls} times, wanted once: its "
                "routing can be neither recorded nor replayed"
            )

    with ExitStack() as hooks:
        for layer, (name, block, experts) in enumerate(blocks):
            for hook in (
                block.register_forward_pre_hook(partial(enter, layer, experts)),
                block.register_forward_hook(partial(leave, name), always_call=True),
            ):
                hooks.callback(hook.remove)
        yield


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """The modules with a router and experts, in the order of layers: name, module, experts."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiLoraExperts):
            experts = module.layer.num_experts
        elif is_experts(module):
            experts = sizes(module)[1][0]
        else:
            continue
        while name.endswith(".base_layer"):  # wrappers of PEFT
            name = name.removesuffix(".base_layer")
        block = name.rpartition(".")[0]
        found[block] = (block, model.get_submodule(block), experts)
    if not found:
        raise ValueError(no_experts(model))
    return list(found.values())
