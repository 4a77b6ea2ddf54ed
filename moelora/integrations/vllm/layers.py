"""Each layer of a batch waits for its own part of the adapters that are still on the way.

    a batch            waits for what it reads before the first attention
    attention          vLLM calls `get_attention_context` on the host, layer by layer: what is
                       launched after a call waits for what is read before the next one
    a full CUDA graph  has no such calls: `run_fullgraph` waits for all, and launches it

The order of the layers with calls is learned from batches, first those of the start-up. Modules of
no such layer, as of an encoder, are waited for as a batch begins. If the order varies, batches wait
for whole adapters; so they do where calls are not hooked (`is_hooked`), and with MLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from moelora.adapters.transfer import Arrival
from moelora.integrations.vllm import say_once, wrap

WHOLE = "batches wait for whole adapters"
NO_LAYER = -1  # before all numbers of layers
Layer: TypeAlias = tuple[str, int]  # ("model.layers", 3), from names of modules
_running: Progress | None = None  # of the last batch of this process


def install() -> None:
    from vllm.model_executor.layers.attention import attention
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    wrap(attention, "get_attention_context", partial(_attending, attention))
    wrap(CudaGraphManager, "run_fullgraph", _launching)


def is_hooked(worker: Any) -> bool:
    """Whether all batches of a worker make the calls that `install` replaces: vLLM's first model
    runner launches full graphs elsewhere, and piecewise graphs may have attention in them."""
    compilation = worker.vllm_config.compilation_config
    return bool(worker.use_v2_model_runner and compilation.splitting_ops_contain_attention())


def layer_of(name: str) -> Layer:
    """The layer that a module is in, by its name."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ("", NO_LAYER) if place is None else (".".join(parts[:place]), int(parts[place]))


class Progress:
    """How the batches of a worker go through its layers."""

    def __init__(self) -> None:
        self.order: tuple[Layer, ...] | None = None  # layers with calls; () if it varies
        self.is_hooked = False
        self._called: list[Layer] = []  # by the forward that runs
        self._is_full = False  # whether the batch is a full graph
        self._left: Sequence[Arrival] = ()  # that the batch has not waited for wholly

    @property
    def is_known(self) -> bool:
        """Whether batches wait layer by layer."""
        return self.is_hooked and bool(self.order)

    def number(self, layer: Layer) -> int:
        """A layer's number if layers of its name have calls, else NO_LAYER."""
        return layer[1] if self.order and layer[0] == self.order[0][0] else NO_LAYER

    def begin(self) -> None:
        """A batch begins, after the last call of the one before it."""
        global _running
        if not self._is_full:
            self._learn()
        _running, self._called, self._is_full, self._left = self, [], False, ()

    def wait(self, arrivals: Sequence[Arrival]) -> None:
        """Let the batch, which has begun, wait for its layers; `is_known`."""
        assert self.order
        self._left = arrivals
        self._wait_up_to(self.order[0])

    def on_attention(self, layer: Layer) -> None:
        """Attention of a layer is launched next."""
        last = self._called[-1] if self._called else None
        if layer == last:
            return
        if last and (layer[0] != last[0] or layer < last):  # another forward
            self._learn()
            self._called = []
        self._called.append(layer)
        count = len(self._called)
        if self.order and self.order[count - 1 : count] != (layer,):
            self._learn()
        if self.order and self.order[count:]:
            self._wait_up_to(self.order[count])
        else:
            self._wait()

    def on_full_graph(self) -> None:
        """A full graph is launched next."""
        self._is_full = True
        self._wait()

    def _learn(self) -> None:
        called = tuple(self._called)
        if self.order is None:
            self.order = called or None
        elif self.order and called != self.order:
            self.order = ()
            early = ", and may have read adapters before they were there" if self._left else ""
            say_once(f"layers of a batch ran in another order{early}; from now on {WHOLE}")

    def _wait_up_to(self, layer: Layer) -> None:
        for arrival in self._left:
            arrival.wait_up_to(layer[1])

    def _wait(self) -> None:
        for arrival in self._left:
            arrival.wait()
        self._left = ()


def _attending(attention: Any, get_attention_context: Callable[..., Any], layer_name: str) -> Any:
    found = get_attention_context(layer_name)
    if _running is not None and isinstance(found[1], attention.Attention):
        _running.on_attention(layer_of(layer_name))
    return found


def _launching(run_fullgraph: Callable[..., Any], self: Any, desc: Any) -> Any:
    if _running is not None:
        _running.on_full_graph()
    return run_fullgraph(self, desc)
