"""Layers of a model that adapters apply to, and pairs of factors of a checkpoint.

An adapter has two kinds of pairs. Those of the experts of a mixture-of-experts layer are
stacked over the experts, and their projections are gate, up and down, wherever a checkpoint or a
model stores them. All others belong to one linear layer (attention, shared experts, dense MLPs,
routers, `lm_head`) or to one embedding:

    y = W x + scaling * B (A x)         A (r, in), B (out, r)

An embedding is the same with one-hot x: A (r, num_embeddings), B (embedding_dim, r), so that the
delta of token id t is `scaling * B A[:, t]`. These are PEFT's `lora_embedding_A` and
`lora_embedding_B` as stored; the delta of the embedding's weight, (num_embeddings, embedding_dim),
is the transpose of `scaling * B A`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

Projection: TypeAlias = Literal["gate", "up", "gate_up", "down"]


@dataclass(frozen=True)
class MoELayer:
    """Shape of an MoE layer that adapters must match.

    `name` is the module path of the experts, e.g. `model.layers.0.mlp.experts`. `interleaved` says
    that rows of w13 alternate between gate and up (gpt-oss) instead of gate rows then up rows.
    `transposed`: the model stores its parameters as (E, in, out), as those with interleaved rows
    do; it only matters for square factors of old versions of PEFT.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False

    def shape(self, projection: Projection) -> tuple[int, int]:
        """(in, out) of a projection."""
        k, i = self.hidden_size, self.intermediate_size
        return {"gate": (k, i), "up": (k, i), "gate_up": (k, 2 * i), "down": (i, k)}[projection]

    @property
    def parameters(self) -> tuple[str, str]:
        """3D parameters of the experts, in registration order."""
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")


@dataclass
class Pair:
    """Factors of one projection: A (E or 1, r, in), B (E or 1, out, r), scaling per expert."""

    a: torch.Tensor
    b: torch.Tensor
    scalings: list[float]  # one per expert, or one for all

    @property
    def rank(self) -> int:
        return self.a.size(1)


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer or an embedding that adapters may apply to.

    `name` is its module path, e.g. `model.layers.0.self_attn.q_proj`. `in_features` and
    `out_features` are those of the product, also where the weight is quantized, transposed, or a
    parameter of a module that is no `nn.Linear` (routers). An `embedding` takes token ids:
    `in_features` is then num_embeddings, `out_features` embedding_dim.
    """

    name: str
    in_features: int
    out_features: int
    embedding: bool = False


@dataclass
class LinearPair:
    """Factors of one linear layer or embedding: A (r, in), B (out, r)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.size(0)


@dataclass
class Adapter:
    """All factors of one adapter, in the dtype of the checkpoint and without NaN: on the CPU, or on
    the GPU of the state dict that they were read from.

    `experts` has the pairs of the layers of experts, by name of the `MoELayer` and projection;
    `linears` those of all other layers, by name of the `LinearLayer`. Layers without factors are in
    neither.
    """

    experts: dict[str, dict[Projection, Pair]]
    linears: dict[str, LinearPair]


@dataclass(frozen=True)
class AdapterInfo:
    """Properties of a checkpoint that are known without reading its tensors.

    `max_rank` is the largest rank among the factors of experts, 0 without any. `linear_ranks` has
    the rank of every linear layer or embedding that the adapter has factors of, `expert_ranks`
    those of the projections of every layer of experts.
    """

    max_rank: int
    fused: bool  # gate and up share one A
    shared_outer: bool  # A of gate and up and B of down are shared by all experts
    linear_ranks: Mapping[str, int] = field(default_factory=dict)
    expert_ranks: Mapping[str, Mapping[Projection, int]] = field(default_factory=dict)
