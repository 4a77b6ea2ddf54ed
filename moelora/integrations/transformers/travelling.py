"""Expert parallelism with adapters: rows are sent to the process of their expert.

`TravellingEP` is transformers' `AutoEP`, whose rows take their adapters along: the bits of a row's
slot are more columns of its hidden state, which the experts' process takes off. Where the processes
of a group share a batch, nothing travels: the operator of each process skips the rows of experts
that it does not have, and outputs are summed, in training too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    AllToAllEP,
    AutoEP,
    EpDispatchExpertsParallel,
    EPImplementationInterface,
)

from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.serving import Serving
from moelora.operators.setting import setting


class TravellingEP(AutoEP):  # type: ignore[misc] # of transformers
    """One per experts module, as transformers makes them."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts: Any = experts
        self.with_slots = AllToAllEP(experts, ep_mesh, tp_mesh)
        self.with_slots.experts_forward = self._arrived

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.all_reduce is not None:
            return self.all_reduce(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        serving = self.experts.__dict__.get("_moelora")
        if not isinstance(serving, Serving):  # none or PEFT's one active adapter
            return self.all_to_all(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        slots = serving.slots_of(self.experts._moelora_layer, hidden_states)
        sent = slots.to(torch.int32)[:, None].view(hidden_states.dtype)
        rows = torch.cat([hidden_states, sent], dim=1)
        return self.with_slots(rows, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    def _arrived(self, rows: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        columns = rows.size(1) - 4 // rows.element_size()  # slots have 4 bytes
        slots = rows[:, columns:].detach().contiguous().view(torch.int32)[:, 0]
        hidden_states = rows[:, :columns].contiguous()
        with setting(self.experts._moelora.now, "travelled", slots):
            result: Tensor = self.experts_forward(hidden_states, expert_ids, weights)
        return result


EPImplementationInterface.register(IMPLEMENTATION, TravellingEP)


def let_travel(model: PreTrainedModel, experts: nn.Module) -> None:
    """Makes the exchange of a module's rows take their adapters along."""
    chosen = model.config.distributed_config.ep_implementation
    if chosen in ("all_reduce", IMPLEMENTATION):
        return
    if chosen not in ("auto", "all_to_all"):
        raise NotImplementedError(
            f"ep_implementation={chosen!r} exchanges rows without their adapters; moelora takes "
            "'auto', 'all_to_all' and 'all_reduce' of DistributedConfig"
        )
    experts.__dict__.setdefault("_moelora_exchange", experts.__dict__.pop("forward"))
    meshes: Any = model._mesh_manager
    EpDispatchExpertsParallel().install_forward(
        experts,
        meshes.get_mesh("ep"),
        tp_mesh=meshes.get_mesh("tp"),
        ep_implementation=IMPLEMENTATION,
    )
