"""Adapters of linear layers and embeddings: deltas that are added to a module's output.

A linear layer's delta is computed as that of a layer with one expert, and added in place: rows
without an adapter keep their bits. Without a kernel (float32 on a GPU, or inputs and factors of
different dtypes) torch computes it. The weight is never read, so it may have any format.

Deltas are added by forward hooks and wrappers of `forward`, both of which torch.compile can trace;
neither does anything in a pass without adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moelora.adapters import LinearLayer
from moelora.adapters.linears import LinearFactors
from moelora.adapters.shards import Shard
from moelora.integrations.transformers.linears import Linear
from moelora.integrations.transformers.serving import Routes, Serving
from moelora.integrations.transformers.tokens import BLOCK, FEW_TOKENS, Lists, Tokens
from moelora.integrations.vllm.ops import fused_moe_lora
from moelora.operators.delta import moe_lora_down_delta

INPUTS = ("input", "hidden_states", "x", "input_ids")  # names of modules' first argument
VLLM_TILES = (BLOCK, 64, 64, 8, 4, 3, 1)


class Delta:
    """The adapters of one layer, as a forward hook of its module."""

    def __init__(self, serving: Serving, layer: LinearLayer, shard: Shard | None) -> None:
        self.serving = serving
        self.layer = layer.name
        self.embedding = layer.embedding
        self.shape = layer.out_features, layer.in_features
        local = layer if shard is None else shard.local(layer)
        self.local = local.out_features, local.in_features

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        tokens = self.serving.tokens(self.layer)
        if tokens is None:
            return None
        x = args[0] if args else next((kwargs[n] for n in INPUTS if n in kwargs), None)
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            raise RuntimeError(
                f"{self.layer} is a {type(module).__name__} that takes {type(x).__name__} and "
                f"returns {type(output).__name__}, wanted a tensor each to add adapters to"
            )
        if not self.embedding:
            return self.add(tokens, x, output)
        return self._add_embedding(tokens, module, x, output)

    def add(self, tokens: Tokens, x: Tensor, output: Tensor) -> Tensor:
        """Adds the deltas of `x`, (*, in), to `output`, (*, out), and returns it.

        In training, tensor-parallel layers have DTensors: deltas are added to this process's part.
        """
        if hasattr(output, "placements"):
            return self._add_local(tokens, x, output)
        serving, device = self.serving, self.serving.devices[self.layer]
        factors, shape = serving.linears[self.layer], x.shape[:-1]
        slots = tokens.of(self.layer, shape, device)
        flat, rows = _matrix(output), _matrix(x)
        if _has_kernel(rows, flat, factors):
            listed = tokens.is_whole(shape) and tokens.count > FEW_TOKENS
            if listed and not _is_recorded(rows, flat, factors):
                lists = tokens.lists(device, factors["adapter_enabled"])
                _add_listed(flat, rows, factors, serving.routes[device], lists)
            else:
                _add(flat, rows, factors, serving.routes[device], slots)
        else:
            shrunk = _shrunk(rows, slots, factors)
            flat = _expanded(flat, shrunk, slots, factors, None)
        return flat.view(output.shape)

    def _add_local(self, tokens: Tokens, x: Any, output: Any) -> Tensor:
        partial = [torch.distributed.tensor.Partial()] if x.placements[0].is_replicate() else None
        local = output.to_local().clone()
        local = self.add(tokens, x.to_local(grad_placements=partial), local)
        sizes = {"shape": output.shape, "stride": output.stride()}
        return type(output).from_local(
            local, output.device_mesh, output.placements, run_check=False, **sizes
        )

    def _add_embedding(
        self, tokens: Tokens, module: nn.Module, ids: Tensor, output: Tensor
    ) -> Tensor:
        device = self.serving.devices[self.layer]
        factors = self.serving.linears[self.layer]
        if module.num_embeddings != self.shape[1]:
            raise RuntimeError(
                f"{self.layer} has {module.num_embeddings} rows, adapters were loaded for "
                f"{self.shape[1]}: call unload_adapters before resize_token_embeddings, and "
                "load_adapters after it"
            )
        slots = tokens.of(self.layer, ids.shape, device)
        flat = output.reshape(-1, output.size(-1))
        a = factors["lora_a"][:, 0]  # (max_loras, num_embeddings, R)
        each = a[slots.clamp_min(0).long(), ids.reshape(-1)]
        shrunk = torch.where(_selected(slots, factors).any(-1, keepdim=True), each, 0)
        scale = getattr(module, "embed_scale", None)  # scales the output, as in Gemma
        return _expanded(flat, shrunk, slots, factors, scale).view(output.shape)


def _matrix(x: Tensor) -> Tensor:
    """Views (*, n) as (rows, n) with contiguous rows; copies only if necessary."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _has_kernel(x: Tensor, out: Tensor, factors: LinearFactors) -> bool:
    dtype = factors["lora_a"].dtype
    same = x.dtype == dtype and out.dtype == dtype and x.device == factors["lora_a"].device
    return same and (x.device.type == "cpu" or dtype != torch.float32)


def _is_recorded(x: Tensor, out: Tensor, factors: LinearFactors) -> bool:
    """Whether autograd records the delta; the operators of lists of blocks have no backward."""
    tensors = x, out, factors["lora_a"], factors["lora_b"]
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _add(out: Tensor, x: Tensor, factors: LinearFactors, routes: Routes, slots: Tensor) -> None:
    moe_lora_down_delta(
        x,
        None,
        routes.topk_ids.expand(x.size(0), 1),
        token_lora_mapping=slots,
        lora_a=factors["lora_a"],
        lora_b=factors["lora_b"],
        lora_ranks=factors["lora_ranks"],
        adapter_enabled=factors["adapter_enabled"],
        num_experts=1,
        out=out[:, None],
    )


def _add_listed(
    out: Tensor, x: Tensor, factors: LinearFactors, routes: Routes, lists: Lists
) -> None:
    enabled = factors["adapter_enabled"]
    fused_moe_lora(
        out[:, None],
        x,
        [factors["lora_a"]],
        [factors["lora_b"]],
        routes.topk_weights.expand(x.size(0), 1),
        lists.sorted_token_ids,
        lists.expert_ids,
        lists.num_tokens_post_padded,
        None,
        factors["lora_a"].size(2),
        1,
        lists.lora_ids,
        enabled.size(0),
        enabled,
        *VLLM_TILES,
        *VLLM_TILES,
        num_experts=1,
    )


# ---- torch ----


def _selected(slots: Tensor, factors: LinearFactors) -> Tensor:
    """(tokens, max_loras) bool, true at the adapter of each token."""
    enabled = factors["adapter_enabled"]
    each = torch.arange(enabled.size(0), device=slots.device, dtype=slots.dtype)
    return (slots[:, None] == each) & enabled


class _ProductsBySlot(torch.autograd.Function):
    """x[t] W^T for the W of token t, zero for tokens without one.

    `x` is (tokens, in), `w` (max_loras, out, in), `selected` (tokens, max_loras) bool with at most
    one true per token. Neither results nor gradients contain a product of a token and another
    token's W or gradient: zero times NaN is NaN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, selected)
        if x.size(0) <= w.size(0):  # a copy of factors, no larger than all of them
            each = selected.to(torch.uint8).argmax(-1)  # of all false: 0
            products = torch.bmm(w[each], x[:, :, None])[:, :, 0]
            return torch.where(selected.any(-1, keepdim=True), products, 0)
        result = x.new_zeros(x.size(0), w.size(1))
        for own, one in zip(selected.unbind(1), w, strict=True):
            result = torch.where(own[:, None], x @ one.T, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, w, selected = ctx.saved_tensors
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        of_w = []
        for own, one in zip(selected.unbind(1), w, strict=True):
            mine = torch.where(own[:, None], grad, 0)
            if of_x is not None:
                of_x = torch.where(own[:, None], mine @ one, of_x)
            if ctx.needs_input_grad[1]:
                of_w.append(mine.T @ torch.where(own[:, None], x, 0))
        return of_x, torch.stack(of_w) if of_w else None, None


def _products(x: Tensor, w: Tensor, selected: Tensor) -> Tensor:
    """`_ProductsBySlot` in the dtype of an autocast, or of `x`."""
    kind = w.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        return _ProductsBySlot.apply(x.to(dtype), w.to(dtype), selected)  # type: ignore[no-untyped-call]


def _shrunk(x: Tensor, slots: Tensor, factors: LinearFactors) -> Tensor:
    """(tokens, R): x A^T at the adapter of each token."""
    a = factors["lora_a"][:, 0]
    x = x.to(a.device, torch.promote_types(x.dtype, torch.float32))
    return _products(x, a, _selected(slots, factors))


def _expanded(
    out: Tensor, shrunk: Tensor, slots: Tensor, factors: LinearFactors, scale: Any | None
) -> Tensor:
    """Adds `shrunk` times B^T to `out`; rows without an adapter are unchanged."""
    selected = _selected(slots, factors)
    delta = _products(shrunk, factors["lora_b"][:, 0], selected)  # of (max_loras, out, R)
    if scale is not None:
        delta = delta * scale
    adapted = selected.any(-1, keepdim=True).to(out.device)
    return torch.where(adapted, (out + delta.to(out.device)).to(out.dtype), out)


# ---- products inside a module ----


class Products(TorchFunctionMode):
    """Replaces products with a weight of one of the shapes (out, in) by `add(x, product)`, and
    counts them.

    `seen` counts the products.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], add: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.shapes = shapes
        self.add = add
        self.seen = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.linear and tuple(args[1].shape) in self.shapes:
            self.seen += 1
            return self.add(args[0], result)
        return result

    def check(self, layer: str, module: nn.Module) -> None:
        """Raises RuntimeError unless a pass of `module` computed exactly one such product."""
        if self.seen != 1:
            raise RuntimeError(
                f"{layer}, a {type(module).__name__}, made {self.seen} products with its weight, "
                "wanted one to add adapters to"
            )


def _forward_inside(
    module: nn.Module, delta: Delta, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces `forward` of a module that multiplies by its weight internally."""
    tokens = delta.serving.tokens(delta.layer)
    if tokens is None:
        return forward(*args, **kwargs)
    products = Products((delta.shape, delta.local), functools.partial(delta.add, tokens))
    with products:
        result = forward(*args, **kwargs)
    products.check(delta.layer, module)
    return result


def install(serving: Serving, layers: Iterable[Linear]) -> None:
    """Makes the modules of `layers` add the adapters of `serving`."""
    for linear in layers:
        module = linear.module
        delta = Delta(serving, linear.layer, linear.shard)
        if linear.way == "inside":
            forward: Any = module.forward
            around = functools.partial(_forward_inside, module, delta, forward)
            module.forward = functools.update_wrapper(around, forward, (), ())
        else:
            module.register_forward_hook(delta, with_kwargs=True)


def uninstall(model: nn.Module, serving: Serving) -> None:
    """Undoes `install`."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Delta) and hook.serving is serving:
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
        around: Any = module.__dict__.get("forward")
        if getattr(around, "func", None) is _forward_inside and around.args[1].serving is serving:
            del module.forward
            if getattr(around.args[2], "__self__", None) is not module:  # ours was outside
                module.forward = around.args[2]
