"""Interface of SGLang's first design of MoE LoRA, on an `AdapterPool`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moelora.adapters import AdapterPool
from moelora.integrations.sglang.batch import (
    MoELoRABatchInfo,
    moe_lora_buffers,
    prepare_moe_lora_batch_of_pool,
)
from moelora.integrations.sglang.ops import run_moe_lora
from moelora.operators.experts import fused_experts_lora


@dataclass(frozen=True, eq=False)
class LayerBatchInfo(MoELoRABatchInfo):
    """Adapters of a batch, and the layer that they apply to."""

    layer: str = ""


class MoELoRABackend:
    """`run_moe_lora` and `prepare_moe_lora_batch` for the MoE layers of one model.

    Parameters
    ----------
    pool : AdapterPool
        The adapters, by the names in the requests' `lora_ids`. `run_moe_lora` needs one with
        `w13_slices=1`.
    layers : mapping of int to str, optional
        Name in the pool of each `layer_id`; by default the first number in the names.

    Raises
    ------
    ValueError
        Without `layers`: a name has no number, or the same first one as another.
    """

    def __init__(self, pool: AdapterPool, layers: Mapping[int, str] | None = None) -> None:
        self.pool = pool
        if layers is None:
            layers = {}
            for name in pool.layers:
                number = re.search(r"\d+", name)
                if number is None or int(number[0]) in layers:
                    raise ValueError(
                        f"layer {name!r} has no number of its own; give layers={{layer_id: name}}"
                    )
                layers[int(number[0])] = name
        self.layers = dict(layers)
        self.reset_batch_state()

    def reset_batch_state(self) -> None:
        """Discard the last prepared batch; required before the object is reused."""
        self._prepared: tuple[Any, MoELoRABatchInfo | None] = (None, None)

    def prepare_moe_lora_batch(self, forward_batch: Any, layer_id: int) -> LayerBatchInfo | None:
        """Assign adapters to tokens, once per batch for all layers.

        Parameters
        ----------
        forward_batch : ForwardBatch
            `lora_ids` of its requests (None = no adapter), `input_ids` and, while it extends,
            `extend_seq_lens_cpu`; otherwise every request has the same number of tokens. The
            adapters must stay in their slots (`AdapterPool.hold`) until it completes.
        layer_id : int
            The calling layer.

        Returns
        -------
        LayerBatchInfo or None
            None if no request has an adapter, or the pool does not have the layer.

        Raises
        ------
        KeyError
            An adapter is not in the pool.
        ValueError
            The tokens do not divide among the requests.
        """
        if layer_id not in self.layers:
            return None
        if self._prepared[0] is not forward_batch:
            self._prepared = (forward_batch, self._prepare(forward_batch))
        info = self._prepared[1]
        return None if info is None else LayerBatchInfo(**vars(info), layer=self.layers[layer_id])

    def _prepare(self, forward_batch: Any) -> MoELoRABatchInfo | None:
        names = forward_batch.lora_ids
        if not any(name is not None for name in names):
            return None
        tokens = forward_batch.input_ids.shape[0]
        lengths = None
        if forward_batch.forward_mode.is_extend():
            lengths = getattr(forward_batch, "extend_seq_lens_cpu", None)
        if lengths is None:
            if tokens % len(names):
                raise ValueError(f"{tokens} tokens do not divide among {len(names)} requests")
            lengths = [tokens // len(names)] * len(names)
        return prepare_moe_lora_batch_of_pool(self.pool, names, seq_lens=lengths, num_tokens=tokens)

    def run_moe_lora(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        moe_lora_info: LayerBatchInfo,
        output: Tensor,
    ) -> Tensor:
        """`moelora.run_moe_lora` with the layer's buffers: accumulates into `output`, not exact."""
        buffers = moe_lora_buffers(self.pool, moe_lora_info.layer)
        return run_moe_lora(
            hidden_states, topk_ids, topk_weights, moe_lora_info, **buffers, output=output
        )

    def fused_experts(
        self,
        hidden_states: Tensor,
        w13_weight: Tensor,
        w2_weight: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        moe_lora_info: LayerBatchInfo | None,
        **options: Any,
    ) -> Tensor:
        """The exact layer: `moelora.fused_experts_lora` with its `options`, with or without
        adapters.
        """
        arguments: dict[str, Any] = {}
        if moe_lora_info is not None:
            arguments = {
                "token_lora_mapping": moe_lora_info.weight_indices,
                **self.pool.layer(moe_lora_info.layer),
            }
        return fused_experts_lora(
            hidden_states, w13_weight, w2_weight, topk_weights, topk_ids, **arguments, **options
        )
