"""`MultiLoraExperts` in the place of a model's experts: many adapters train side by side."""

from __future__ import annotations

from torch import nn

from moelora.integrations.transformers.experts import activation_of, biases_of, weights_of
from moelora.integrations.transformers.layers import moe_layers
from moelora.training import MultiLoraExperts


def multi_lora(model: nn.Module, *, slots: int, max_rank: int) -> None:
    """Replace the experts modules of a model by `MultiLoraExperts` of the same weights.

    Where a model runs `grouped_mm` or another experts implementation, this module runs instead.
    Weights are not copied. Call it before `fully_shard`, which then shards weights and slots.
    `moelora.training.LoraSlot(model, n)` opens slots, `set_adapters(model, index)` says whose rows
    those of the next batches are.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        16-bit or float32 experts, or those of `load_quantized`. All other parameters are left as
        they are: freeze them with `model.requires_grad_(False)` before.
    slots, max_rank : int
        Of `MultiLoraExperts`.

    Raises
    ------
    ValueError, NotImplementedError
        The model has no experts, or some that moelora cannot run; nothing is replaced.
    """
    found = {}
    names = {module: name for name, module in model.named_modules()}
    for module, _ in moe_layers(model).values():
        activation, alpha, limit = activation_of(module)  # type: ignore[arg-type] # an experts module
        w13, w2 = weights_of(module)  # type: ignore[arg-type]
        w13_bias, w2_bias = biases_of(module, w13.dtype)  # type: ignore[arg-type]
        found[names[module]] = MultiLoraExperts(
            w13,
            w2,
            slots=slots,
            max_rank=max_rank,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            activation_alpha=alpha,
            activation_limit=limit,
            transposed=bool(module.is_transposed),
        )
    for name, experts in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, experts)
