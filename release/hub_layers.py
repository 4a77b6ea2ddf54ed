"""Layers that `kernels.kernelize` (transformers' `use_kernels=True`) puts into a model."""

from torch import Tensor, nn


class MegaBlocksMoeMLP(nn.Module):
    """Of gpt-oss: its `forward` becomes that of the module that has the router and the experts.

    `hidden_states`: (batch, tokens, hidden). Returns their experts' output, of that shape, and the
    weights of each token's experts, (batch * tokens, top_k).
    """

    can_torch_compile = True
    has_backward = False  # of the experts' weights
    router: nn.Module
    experts: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        from .integrations.transformers.experts import experts_forward

        rows = hidden_states.flatten(0, -2)
        _, weights, ids = self.router(rows)
        return experts_forward(self.experts, rows, ids, weights).view_as(hidden_states), weights
