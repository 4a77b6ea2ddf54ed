"""Frozen experts as a module, with an adapter in each of its slots that trains as if it were alone.

    experts.slots[n]      float32 parameters of slot n, for any optimizer: views of one stack
    LoraSlot(model, n)    slot n of all such modules of a model (lora_slot.py)

What an optimizer does to a slot's parameters is what the next forward reads. Where something else
holds the parameters (FSDP2 gathers them for each forward), the stack is copied from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moelora.adapters.layers import MoELayer
from moelora.adapters.stacks import padded
from moelora.operators.checks import check_count
from moelora.operators.experts import Activation, Weights, fused_experts_lora
from moelora.operators.tiles import TiledWeights

FACTORS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")


class MultiLoraExperts(nn.Module):
    """The frozen experts of a layer, and `slots` adapters of them that train.

    Parameters
    ----------
    w13, w2 : Tensor, Parameter, PackedWeights or QuantizedWeights
        Of `fused_experts_lora`, (E, 2 I, K) ((E, I, K) for "relu2") and (E, K, I). Tensors become
        parameters that require no gradient, tiles buffers.
    slots : int
        Number of adapters.
    max_rank : int
        Largest rank of an adapter; parameters have it, rounded up to a multiple of 8.
    w13_bias, w2_bias : Tensor, optional
    activation, activation_alpha, activation_limit, expert_map, apply_router_weight_on_input
        Of `fused_experts_lora`.
    transposed : bool
        The model stores its weights as (E, in, out); for reading PEFT's folders.

    Attributes
    ----------
    slots : ModuleList
        For each slot its parameters, float32: `w13_lora_a` (E, R, K), `w13_lora_b` (E, 2 I, R),
        `w2_lora_a` (E, R, I), `w2_lora_b` (E, K, R). Zero, and beyond the true rank they stay zero
        under optimizers that leave alone what has no gradient and is 0.
    lora_ranks : Tensor, shape (slots,), int32
        True ranks; 0 of a slot that is not open, whose rows are those of the base model.
    lora_scalings : Tensor, shape (slots,), float32
    adapters : Tensor or None
        Adapters of the next forwards that are called without: `set_adapters`.

    Raises
    ------
    ValueError
        A shape does not fit the others, or a number is no count; or as `fused_experts_lora`.
    TypeError
        As `fused_experts_lora`.

    Notes
    -----
    After a backward all slots have gradients, zeros where no row of theirs was in the batch: step
    the optimizers of those that were. The gradients of a slot have the bits of training alone.
    Slots share memory: opening, putting or stepping one between a forward and its backward makes
    that backward raise. Between batches no slot affects another.

    Examples
    --------
    >>> import torch
    >>> from moelora.training import LoraSlot, MultiLoraExperts
    >>> w13, w2 = torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    >>> experts = MultiLoraExperts(w13, w2, slots=2, max_rank=8)
    >>> law = LoraSlot(experts, 0).open(rank=4)
    >>> optimizer = torch.optim.AdamW(law.parameters(), lr=1e-3)
    >>> topk_weights, topk_ids = torch.rand(6, 4).topk(2)
    >>> adapters = torch.tensor([0, 0, 0, 1, -1, -1])
    >>> out = experts(torch.randn(6, 16), topk_ids, topk_weights, adapters)
    >>> out[:3].square().mean().backward()
    >>> optimizer.step()
    >>> held = law.take(optimizer)  # on the host; the slot is free
    """

    def __init__(
        self,
        w13: Weights,
        w2: Weights,
        *,
        slots: int,
        max_rank: int,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        activation: Activation = "silu",
        activation_alpha: float | None = None,
        activation_limit: float | None = None,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        check_count("slots", slots)
        check_count("max_rank", max_rank)
        gated = activation != "relu2"
        e, n, k = w13.shape if len(w13.shape) == 3 else (0, 0, 0)
        i = w2.shape[-1] if w2.shape else 0
        if tuple(w2.shape) != (e, k, i) or n != (2 * i if gated else i):
            wanted = "(E, 2 I, K) and (E, K, I)" if gated else "(E, I, K) and (E, K, I)"
            raise ValueError(
                f"w13 and w2 are {tuple(w13.shape)} and {tuple(w2.shape)}, wanted {wanted}"
            )
        self.max_rank = max_rank
        self.layer = MoELayer("", e, k, i, gated, activation == "swigluoai", transposed)
        self._tiles: dict[str, TiledWeights] = {}
        for name, weights in (("w13", w13), ("w2", w2)):
            if isinstance(weights, TiledWeights):
                self.register_buffer(name, weights.data)
                self._tiles[name] = replace(weights, data=torch.empty(0))  # type: ignore[type-var]
            else:
                frozen = weights if isinstance(weights, nn.Parameter) else nn.Parameter(weights)
                frozen.requires_grad_(False)
                self.register_parameter(name, frozen)
        for name, value in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
            self.register_buffer(name, None if value is None else value.detach())
        self.register_buffer("expert_map", expert_map)
        self._options: dict[str, Any] = {
            "activation": activation,
            "activation_alpha": activation_alpha,
            "activation_limit": activation_limit,
            "apply_router_weight_on_input": apply_router_weight_on_input,
        }
        device, rank = w13.device, padded(max_rank)
        shapes = (rank, k), (n, rank), (rank, i), (k, rank)
        self._stacks = {
            name: torch.zeros(slots, e, *shape, device=device)
            for name, shape in zip(FACTORS, shapes, strict=True)
        }
        self.slots = nn.ModuleList(
            nn.ParameterDict({name: stack[slot] for name, stack in self._stacks.items()})
            for slot in range(slots)
        )
        self.register_buffer("lora_ranks", torch.zeros(slots, dtype=torch.int32, device=device))
        self.register_buffer("lora_scalings", torch.ones(slots, device=device))
        self.adapters: Tensor | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> MultiLoraExperts:
        buffers: Any = self._buffers
        scalings = buffers["lora_scalings"]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # of torch
        if (rounded := buffers["lora_scalings"]).dtype != torch.float32:  # by model.bfloat16()
            buffers["lora_scalings"] = scalings.to(rounded.device)
        for name in FACTORS:  # each parameter has moved by itself
            moved = [getattr(slot, name) for slot in self.slots]
            if any(hasattr(p, "placements") or p.dtype != torch.float32 for p in moved):
                continue  # FSDP2's part of it, or no longer float32: `_stack` copies
            self._stacks[name] = stack = torch.stack([p.detach() for p in moved])
            for slot, parameter in enumerate(moved):
                parameter.data = stack[slot]
        return self

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """The layer, with the signature of transformers' experts.

        Parameters
        ----------
        hidden_states : Tensor, shape (..., K)
            Rounded to the dtype of the weights.
        top_k_index : Tensor, shape (..., top_k), int32 or int64
        top_k_weights : Tensor, shape (..., top_k)
        adapters : Tensor, integers, optional
            The slot of each row, or of each sequence of as many rows; -1: none, as all by default
            (`set_adapters` has another default).

        Returns
        -------
        Tensor, shape (..., K)

        Raises
        ------
        ValueError
            `adapters` has no integers, the number of rows is not a multiple of that of `adapters`,
            or as `fused_experts_lora`.
        """
        w13, w2 = (
            replace(self._tiles[n], data=getattr(self, n)) if n in self._tiles else getattr(self, n)  # type: ignore[type-var]
            for n in ("w13", "w2")
        )
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        lora: dict[str, Any] = {}
        if (adapters := self.adapters if adapters is None else adapters) is not None:
            _check_index(adapters)
            count = adapters.numel()
            if count == 0 or len(rows) % count:
                raise ValueError(
                    f"adapters has {count} numbers for {len(rows)} rows, wanted one for each row "
                    "or for each sequence of as many rows"
                )
            lora = {name: self._stack(name) for name in FACTORS}
            index = adapters.to(rows.device, torch.int64).reshape(-1)
            lora["token_lora_mapping"] = index.repeat_interleave(len(rows) // count)
            lora |= {"lora_ranks": self.lora_ranks, "lora_scalings": self.lora_scalings}
        out = fused_experts_lora(
            rows.to(w13.dtype),
            w13,
            w2,
            top_k_weights.reshape(len(rows), top_k_weights.shape[-1]).float(),
            top_k_index.reshape(len(rows), top_k_index.shape[-1]),
            w13_bias=self.w13_bias,  # type: ignore[arg-type] # buffers
            w2_bias=self.w2_bias,  # type: ignore[arg-type]
            expert_map=self.expert_map,  # type: ignore[arg-type]
            **self._options,
            **lora,
        )
        return out.to(hidden_states.dtype).view_as(hidden_states)

    def _stack(self, name: str) -> Tensor:
        """A factor of all slots; its gradient is split among the parameters."""
        stack, parameters = self._stacks[name], [getattr(slot, name) for slot in self.slots]
        shared = stack.untyped_storage().data_ptr()
        if any(p.untyped_storage().data_ptr() != shared for p in parameters):
            return torch.stack(parameters)
        return _Joined.apply(stack, *parameters)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"{self.layer.num_experts} experts, {len(self.slots)} slots of rank {self.max_rank}"


class _Joined(torch.autograd.Function):
    """The stack that all parameters are views of."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, *slots: Tensor) -> Tensor:
        # After `_apply` parameters no longer share the stack's version counter: autograd checks
        # theirs in the backward.
        ctx.save_for_backward(*slots)
        return stack.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        return None, *grad.unbind(0)


def _check_index(adapters: object) -> None:
    if not isinstance(adapters, Tensor):
        raise ValueError(f"adapters is a {type(adapters).__name__}, wanted a tensor of integers")
    if adapters.is_floating_point() or adapters.is_complex() or adapters.dtype == torch.bool:
        raise ValueError(f"adapters has dtype {adapters.dtype}, wanted integers")


def set_adapters(model: nn.Module, adapters: Tensor | None) -> None:
    """Set the adapters of all `MultiLoraExperts` of a model, until the next call.

    Parameters
    ----------
    adapters : Tensor, integers, or None
        The slot of each row or sequence of the batches that follow, -1 for none; None: no adapters.
        A backward with activation checkpointing runs forwards again: set others only after it.

    Raises
    ------
    ValueError
        `adapters` has no integers, or the model has no `MultiLoraExperts`.
    """
    if adapters is not None:
        _check_index(adapters)
    found = [module for module in model.modules() if isinstance(module, MultiLoraExperts)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no MultiLoraExperts")
    for module in found:
        module.adapters = adapters
