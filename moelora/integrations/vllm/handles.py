"""Tensors of another process of this machine, without a pipe or a disk: `share_tensors`.

    trainer   handle = share_tensors(tensors); queue.put((config, handle)); ...; del handle
    engine    update_adapters(llm, {"law": queue.get()})
    workers   `opened`: views of the trainer's buffer, by CUDA IPC or in shared memory

All tensors are copied to one buffer, so that a worker opens one handle, whose fields are numbers,
strings and bytes: none is a pickle. The buffer begins with a random token that the handle repeats.
A trainer erases it with the buffer, so a worker tells what is gone from what is there.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moelora.integrations import shown
from moelora.operators.checks import dtype_name
from moelora.operators.storage import check_held
from moelora.operators.torch_private import open_shared, shared_fields

ALIGN = 256  # bytes, as of allocations; the token has the first
_TOKEN = 16


@dataclass(frozen=True)
class SharedTensors:
    """What `share_tensors` returns. Copies of it that went through a queue keep no tensors."""

    device: str  # UUID of the GPU, or "cpu"
    token: bytes
    storage: tuple[Any, ...]  # fields of torch's handle
    index: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, first byte
    buffer: Tensor | None = field(compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"buffer": None}

    def sent(self, inside: bool) -> Any:
        """What workers get: fields for `opened`, or tensors where these are in their process."""
        if inside and self.buffer is not None:
            return _views(self.buffer, self.index)
        return [self.device, self.token, self.storage, self.index]


def share_tensors(tensors: Mapping[str, Tensor]) -> SharedTensors:
    """Copy tensors to a buffer that an engine in another process reads.

    Parameters
    ----------
    tensors : mapping
        Name -> tensor, all on one GPU or all on the host: of `LoraSlot.tensors(host=False)` for
        instance. They may be written as soon as this returns.

    Returns
    -------
    SharedTensors
        For `update_adapters`, in the place of tensors. Keep it until the engine has answered; the
        buffer goes with it.

    Raises
    ------
    ValueError
        There are no tensors, they are on several devices, or the storage of one was freed.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise ValueError(f"tensors are on {sorted(map(str, devices))}, wanted one device")
    for name, tensor in tensors.items():
        check_held(name, tensor)
    index, nbytes = [], ALIGN
    for name, tensor in tensors.items():
        index.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), nbytes))
        nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
    token, (device,) = secrets.token_bytes(_TOKEN), devices
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer[:_TOKEN] = torch.tensor([*token], dtype=torch.uint8)
    for name, view in _views(buffer, index).items():
        view.copy_(tensors[name].detach())
    uuid = _uuid(device) if device.type == "cuda" else "cpu"
    fields = shared_fields(buffer.untyped_storage())
    shared = SharedTensors(uuid, token, fields, tuple(index), buffer)
    weakref.finalize(shared, buffer[:_TOKEN].zero_).atexit = False
    return shared


def opened(sent: Sequence[Any], worker: Any) -> dict[str, Tensor]:
    """The tensors of a handle, on the host or a worker's GPU: views of the other process's buffer,
    unless that is on another GPU. ValueError if they cannot be read."""
    uuid, token, fields, index = sent
    try:
        local = None
        if uuid != "cpu":
            numbers = range(torch.cuda.device_count())
            local = next((n for n in numbers if _uuid(torch.device("cuda", n)) == uuid), None)
            if local is None:
                raise ValueError(
                    f"the tensors are on GPU {uuid}, which this worker does not see: share them on "
                    "one of its GPUs, or on the host"
                )
        storage = open_shared(fields, local)
    except RuntimeError as error:
        raise ValueError(f"{_GONE} ({shown(error)})") from None
    buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if bytes(buffer[:_TOKEN].tolist()) != token:
        raise ValueError(_GONE)
    views = _views(buffer, index)
    return views if uuid == "cpu" else {n: view.to(worker.device) for n, view in views.items()}


_GONE = "the shared tensors are gone: keep what share_tensors returns until the engine has answered"


def _views(buffer: Tensor, index: Sequence[Any]) -> dict[str, Tensor]:
    views = {}
    for name, dtype, shape, start in index:
        of = getattr(torch, dtype)
        stop = start + torch.Size(shape).numel() * of.itemsize
        views[name] = buffer[start:stop].view(of).view(tuple(shape))
    return views


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
