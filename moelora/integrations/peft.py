"""The experts of a PEFT model in moelora: `adapter_names=` for MoE layers.

    import moelora.integrations.peft as moelora_peft

    model = PeftModel.from_pretrained(model, "adapters/law", adapter_name="law")
    model.load_adapter("adapters/code", adapter_name="code")
    moelora_peft.attach(model)
    model.generate(**batch_of_three, adapter_names=["law", "__base__", "code"])

By itself PEFT adds the adapters of `target_parameters` to the experts' weights, one adapter for the
whole batch, and refuses `adapter_names`. Once attached, the experts read a pool, every row with its
own adapter; attention and all other layers, `set_adapter`, `disable_adapter` and beams stay PEFT's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import peft
import torch
from torch import nn

from moelora.adapters import AdapterPool, MoELayer
from moelora.integrations.transformers import BASE, IMPLEMENTATION, moe_layers, new_pool


class _Experts:
    """What the experts modules of an attached model share; their adapters are copied on first use.

    `rows` holds the names, one per row, of the call of an experts module that is under way.
    """

    def __init__(self, model: peft.PeftModel, pool: AdapterPool) -> None:
        self.model = model
        self.pool = pool
        self.arguments = {name: pool.layer(name) for name in pool.layers}
        self.elsewhere: set[str] = set()  # adapters without factors of experts
        self.rows: Sequence[str] = ()
        self._mapping: tuple[Any, torch.Tensor] | None = None  # of the latest call

    def __reduce__(self) -> tuple:
        """A copy of the model has an empty pool, which fills from the copied adapters.

        An unpickled model has to be attached again.
        """
        p = self.pool
        return _copy, (self.model, [*p.layers.values()], p.max_loras, p.max_rank, p.dtype, p.device)

    def add(self, name: str) -> None:
        """Copies the factors of one of PEFT's adapters into the pool."""
        if name not in self.model.peft_config:
            raise ValueError(f"no adapter {name!r}; PEFT has {sorted(self.model.peft_config)}")
        state = peft.get_peft_model_state_dict(
            self.model, adapter_name=name, save_embedding_layers=False
        )
        paths = tuple(f"base_model.model.{layer}." for layer in self.pool.layers)
        state = {key: factor for key, factor in state.items() if key.startswith(paths)}
        if state:
            self.pool.add(name, state, config=self.model.peft_config[name].to_dict())
        else:
            self.elsewhere.add(name)

    def adapters(self, layer: str, hidden_states: torch.Tensor) -> dict[str, Any]:
        """The adapter arguments of `fused_experts_lora` for one layer."""
        names = {n for n in self.rows if n != BASE and n not in self.elsewhere}
        with ExitStack() as held:  # what this batch needs does not evict itself
            for name in sorted(names, key=lambda n: n not in self.pool):
                if name not in self.pool:
                    self.add(name)
                if name in self.pool:
                    held.enter_context(self.pool.hold([name]))
            slots = {n: self.pool.lookup(n) for n in names - self.elsewhere}
        if not slots:
            return {}
        ids = [slots.get(n, -1) for n in self.rows]
        tokens = hidden_states.shape[0]
        key = (ids, tokens, hidden_states.device)
        if self._mapping is None or self._mapping[0] != key:
            if tokens % len(ids):
                raise ValueError(f"adapter_names has {len(ids)} rows, the batch {tokens} tokens")
            rows = torch.tensor(ids, dtype=torch.int32).to(hidden_states.device)
            self._mapping = key, rows[:, None].expand(-1, tokens // len(ids)).reshape(-1)
        return {"token_lora_mapping": self._mapping[1], **self.arguments[layer]}


def _copy(
    model: peft.PeftModel,
    layers: list[MoELayer],
    max_loras: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Experts:
    pool = AdapterPool(layers, max_loras, max_rank, dtype=dtype, device=device, w13_slices=1)
    return _Experts(model, pool)


def forward(
    wrapper: nn.Module,
    hidden_states: torch.Tensor,
    *args: Any,
    adapter_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """In place of `ParamWrapper.forward`: names the rows' adapters and calls the experts."""
    experts = wrapper.get_base_layer()
    if wrapper.merged:
        raise RuntimeError("an adapter is merged into the experts; call unmerge_adapter first")
    if wrapper.disable_adapters:
        adapter_names = [BASE]
    elif adapter_names is None:
        adapter_names = wrapper.active_adapters or [BASE]
        if len(adapter_names) > 1:
            raise NotImplementedError(
                f"adapters {adapter_names} are active at once; moelora applies one per row"
            )
    serving = experts._moelora
    serving.rows = adapter_names
    try:
        return experts(hidden_states, *args, **kwargs)
    finally:
        serving.rows = ()


def attach(
    model: peft.PeftModel,
    *,
    max_loras: int | None = None,
    max_rank: int | None = None,
    dtype: torch.dtype | None = None,
) -> AdapterPool:
    """Runs the experts of a PEFT model in moelora, each row of a batch with its own adapter.

    Parameters
    ----------
    model : peft.PeftModel
        A transformers model with LoRA adapters, some of which target the parameters of experts.
    max_loras, max_rank : int, optional
        Size of the pool; by default just enough for the adapters that PEFT has now. Adapters that
        it loads later are copied when they are first used, over the least recently used ones.
    dtype : torch.dtype, optional
        Of the factors, by default that of the experts.

    Returns
    -------
    AdapterPool
        The factors of the experts, copied: `pool.remove(name)` after changing those in PEFT.

    Raises
    ------
    ValueError
        No experts are targeted, or an adapter uses an option that moelora has not.
    NotImplementedError
        moelora cannot run these experts.
    """
    base = model.get_base_model()
    layers = moe_layers(base)
    wrappers = {name: base.get_submodule(name) for name in layers}
    wrapped = {name: layer for name, layer in layers.items() if wrappers[name] is not layer[0]}
    if not wrapped:
        raise ValueError("no adapter of this model targets its experts (target_parameters)")
    configs = model.peft_config
    if max_rank is None:
        max_rank = max(r for c in configs.values() for r in (c.r, *c.rank_pattern.values()))
    pool = new_pool(wrapped, max_loras or len(configs), max_rank, dtype=dtype, w13_slices=1)
    serving = _Experts(model, pool)
    for name in list(configs)[: pool.max_loras]:
        serving.add(name)
    base.set_experts_implementation(IMPLEMENTATION)
    for name, (experts, _) in wrapped.items():
        experts._moelora, experts._moelora_layer = serving, name
        wrappers[name].forward = MethodType(forward, wrappers[name])
    return pool


def detach(model: peft.PeftModel) -> None:
    """Gives the experts' adapters back to PEFT."""
    base = model.get_base_model()
    for name, (experts, _) in moe_layers(base).items():
        experts.__dict__.pop("_moelora", None)
        base.get_submodule(name).__dict__.pop("forward", None)
