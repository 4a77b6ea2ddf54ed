"""Adapter files with a pair of factors for each expert, read straight into stacks.

vLLM pins each factor, stacks the experts of a layer, and pins the stacks, while no request runs.
Here a file is read once, into what vLLM would have after it merged the adapter:

    open       names, shapes and dtypes
    allocate   a pinned stack for each projection and side of a layer of experts, and a tensor for
               each factor of another module
    read       `preadv` scatters consecutive factors of the file into their places, in threads

vLLM itself reads adapters of another form, those that it refuses, and any that fails here.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import torch
from torch import Tensor

from moelora.adapters.weights import DTYPES, STEM
from moelora.integrations import shown
from moelora.integrations.vllm import say_once, wrap

FILE = f"{STEM}.safetensors"
THREADS = 4  # that copy from the page cache
FACTORS = 512  # that one `preadv` reads: Linux takes 1024

_manager: ContextVar[Any] = ContextVar("the LoRAModelManager that loads an adapter", default=None)


def install() -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.worker_manager import WorkerLoRAManager

    wrap(WorkerLoRAManager, "_load_adapter", _loading)
    wrap(LoRAModel, "from_local_checkpoint", _stacked)


def _loading(load_adapter: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    token = _manager.set(self._adapter_manager)
    try:
        return load_adapter(self, lora_request)
    finally:
        _manager.reset(token)


def _stacked(
    from_local_checkpoint: Callable[..., Any],
    lora_dir: str,
    expected_lora_modules: set[str],
    *args: Any,
    **named: Any,
) -> Any:
    path, manager, model = os.path.join(lora_dir, FILE), _manager.get(), None
    if manager is not None and os.path.isfile(path):
        try:
            model = _load(manager, path, **named)
        except Exception as error:
            say_once(f"vLLM reads an adapter by itself ({shown(error)})")
    if model is None:
        model = from_local_checkpoint(lora_dir, expected_lora_modules, *args, **named)
    return model


def _load(
    manager: Any, path: str, *, peft_helper: Any, device: str, dtype: torch.dtype, **named: Any
) -> Any:
    """A LoRAModel whose experts are stacked and scaled; None for an adapter of another form."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights

    taken = inspect.signature(LoRAModel.from_lora_tensors).parameters
    more = [value for name, value in named.items() if name not in taken]
    patterns = [getattr(peft_helper, f"{key}_pattern", None) for key in ("rank", "alpha")]
    if any(more) or any(patterns) or str(device) != "cpu":
        return None
    layers = dict(_layers(manager))
    tensors = _read(path, _places(manager, layers), dtype, named.get("weights_mapper"))
    if tensors is None:
        return None
    named = {name: value for name, value in named.items() if name in taken}
    model = LoRAModel.from_lora_tensors(
        tensors=tensors, peft_helper=peft_helper, device=device, dtype=dtype, **named
    )
    for layer, names in layers.items():
        loras = [model.loras.pop(name, None) for name in names[:3]]
        if any(loras):
            model.loras[layer] = PackedLoRALayerWeights.pack_moe_stacked(loras, layer)
    _in_threads(_scale, model.loras.values())
    return model


def _layers(manager: Any) -> Iterator[tuple[str, list[str]]]:
    """Layers with gate, down and up of all experts, and the names of these modules by expert."""
    for layer, names in manager.packed_modules.items():
        stacks: Any = getattr(manager.modules.get(layer), "w13_lora_b_stacked", ())
        if len(stacks) == 2 and len(names) == 3 * stacks[0].shape[1]:
            yield layer, names


def _places(manager: Any, layers: dict[str, list[str]]) -> dict[str, tuple[str, int, int]]:
    """By module: the name of its stack, which is that of the first expert; its index in the stack;
    the length of the stack.

    Packed modules are left out: vLLM takes factors of their parts alone.
    """
    places = {name: (name, 0, 1) for name in manager.modules if name not in manager.packed_modules}
    places |= {name: (name, 0, 1) for name in itertools.chain(*manager.packed_modules.values())}
    for names in layers.values():
        places |= {n: (names[i % 3], i // 3, len(names) // 3) for i, n in enumerate(names)}
    return places


@dataclass
class _Stack:
    tensor: Tensor  # (number, *shape of a factor)
    filled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._bytes = self.tensor.view(-1).view(torch.uint8).numpy().data

    def take(self, place: int) -> memoryview:
        self.filled.add(place)
        size = len(self._bytes) // len(self.tensor)
        return self._bytes[place * size : (place + 1) * size]


def _read(
    path: str, places: dict[str, tuple[str, int, int]], dtype: torch.dtype, weights_mapper: Any
) -> dict[str, Tensor] | None:
    """What `_allocated` has for a file, filled."""
    with open(path, "rb", buffering=0) as file:
        allocated = _allocated(file, places, dtype, weights_mapper)
        if allocated is None:
            return None
        tensors, buffers = allocated
        _fill(file, buffers)
    return tensors


def _allocated(
    file: FileIO, places: dict[str, tuple[str, int, int]], dtype: torch.dtype, weights_mapper: Any
) -> tuple[dict[str, Tensor], list[memoryview]] | None:
    """Stacks and factors, by the name of their first factor, and what each factor fills of them, in
    the order of the file; None if a factor has no place or no other side, a stack is not full, or
    there is none."""
    from safetensors import safe_open
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.utils.platform_utils import is_pin_memory_available

    pin = is_pin_memory_available()
    stacks: dict[tuple[str, bool], _Stack] = {}
    tensors, buffers = {}, []
    # By its descriptor: a new file that takes the place of this one may have other offsets.
    with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened:
        factors = {key: opened.get_slice(key) for key in opened.offset_keys()}
    try:
        names = {key: parse_fine_tuned_lora_name(key, weights_mapper) for key in factors}
    except ValueError:  # not a factor: vLLM passes it over, or refuses it
        return None
    if any(module not in places for module, _ in names.values()):
        return None  # before anything is pinned
    for key, factor in factors.items():
        module, is_a = names[key]
        shape, kind = factor.get_shape(), DTYPES.get(factor.get_dtype())
        if kind is None:
            return None
        name, place, number = places[module]
        if (name, is_a) not in stacks:
            pinned = pin and kind == dtype  # vLLM converts others
            stacks[name, is_a] = _Stack(
                torch.empty(number, *shape, dtype=kind, device="cpu", pin_memory=pinned)
            )
        stack = stacks[name, is_a]
        tensor, filled = stack.tensor, stack.filled
        if [*tensor.shape[1:]] != shape or tensor.dtype != kind or place in filled:
            return None
        if place == 0:
            tensors[key] = tensor if number > 1 else tensor[0]
        buffers.append(stack.take(place))
    full = all(len(stack.filled) == len(stack.tensor) for stack in stacks.values())
    paired = all((name, not is_a) in stacks for name, is_a in stacks)
    if not (full and paired and any(len(stack.tensor) > 1 for stack in stacks.values())):
        return None
    return tensors, buffers


def _fill(file: FileIO, buffers: list[memoryview]) -> None:
    """Read what follows the header of a safetensors file into buffers."""
    start = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    offsets = [*itertools.accumulate(map(len, buffers), initial=start)]

    def read(first: int) -> None:
        last = min(first + FACTORS, len(buffers))
        at, left = offsets[first], buffers[first:last]
        while at < offsets[last]:  # Linux reads 2 GiB at most, some file systems less
            count = os.preadv(file.fileno(), left, at)
            if count == 0:
                raise OSError(f"{file.name} ends early")
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]

    _in_threads(read, range(0, len(buffers), FACTORS))


def _scale(lora: Any) -> None:
    with torch.inference_mode():  # a thread starts outside, where such tensors cannot be changed
        lora.optimize()


def _in_threads(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call a function with each item; after an error, too, no call goes on."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(function, items))
