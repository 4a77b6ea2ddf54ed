"""Tensors of an adapter: from safetensors or torch files, or a state dict.

Files are searched in this order, each also in shards (`-00001-of-00002`, with or without
their index):

    adapter_model.safetensors
    adapter_model.bin            tensors and nothing else (torch_file.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from moelora.adapters.factors import Stored, check_plain, first_not_finite
from moelora.adapters.files import file_in, read_json
from moelora.adapters.torch_file import read_torch_file

STEM = "adapter_model"
ENDINGS = (".safetensors", ".bin")

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of safetensors

Weights: TypeAlias = Mapping[str, Stored]


class State(dict[str, Stored]):
    """A state dict. Tensors stay on the GPU if all of them are on the same one."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        for key, tensor in state.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r:.80} of the state dict is a {type(key).__name__}")
            check_plain(f"{key:.200}", tensor)
        devices = {tensor.device for tensor in state.values()}
        self._stays = len(devices) == 1 and devices.pop().type == "cuda"
        for key, tensor in state.items():
            own = tensor.detach()
            read = own.detach if self._stays else own.cpu
            self[key] = Stored(tuple(own.shape), own.dtype, read)

    def check_together(self, keys: Sequence[str]) -> bool:
        """Whether these tensors are on a GPU, and were checked there. ValueError for NaN or Inf."""
        if not self._stays:
            return False
        if (found := first_not_finite([self[key].read() for key in keys])) is not None:
            raise ValueError(f"{keys[found]} holds NaN or Inf")
        return True


def _safetensors(path: Path, opened: ExitStack) -> Weights:
    """The tensors of one safetensors file, open until `opened` closes."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ImportError("reading adapters needs safetensors: pip install safetensors") from None

    @contextmanager
    def named() -> Iterator[None]:
        """Add the file's name to errors."""
        try:
            yield
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def read(key: str) -> torch.Tensor:
        with named():
            return file.get_tensor(key)

    with named():
        file: Any = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
        slices = {key: file.get_slice(key) for key in file.keys()}
        return {
            key: Stored(
                tuple(one.get_shape()),
                DTYPES.get(one.get_dtype(), one.get_dtype()),
                partial(read, key),
            )
            for key, one in slices.items()
        }


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Files with the tensors of an adapter, and the keys of each according to an index.

    Raises
    ------
    FileNotFoundError
        There are none; the message lists what there is instead.
    ValueError
        A shard is missing, or the index names a file outside the folder.
    """
    for ending in ENDINGS:
        whole = file_in(folder, f"{STEM}{ending}")
        if whole.is_file():
            return {whole: []}
        index = file_in(folder, f"{STEM}{ending}.index.json")
        if index.is_file():
            return _indexed(index)
        if shards := _numbered(folder, ending):
            return {path: [] for path in shards}
    known = (*ENDINGS, ".pt", ".gguf")
    found = sorted(p.name for p in folder.iterdir() if p.suffix in known and p.is_file())
    hint = f"; it holds {', '.join(found[:5])}" if found else ""
    raise FileNotFoundError(f"{folder} holds no {STEM}.safetensors{hint}")


def _indexed(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r:.200}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r:.80}, wanted a file of its folder")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index.parent} has no file {name}, which {index.name} names")
    if not names:
        raise ValueError(f"{index} names no files")
    keys: dict[str, list[str]] = {name: [] for name in names}
    for key, name in weight_map.items():
        keys[name].append(key)
    return {file_in(index.parent, name): keys[name] for name in names}


def _numbered(folder: Path, ending: str) -> list[Path]:
    form = re.compile(rf"{STEM}-([0-9]{{5}})-of-([0-9]{{5}}){re.escape(ending)}")
    names = sorted(p.name for p in folder.iterdir())
    found = {name: match for name in names if (match := form.fullmatch(name)) is not None}
    if not found:
        return []
    numbers = [(int(match[1]), int(match[2])) for match in found.values()]
    total = numbers[0][1]
    if numbers != [(n, total) for n in range(1, total + 1)]:
        raise ValueError(
            f"{folder} has the shards {', '.join([*found][:5])}, wanted all of 1 to {total}"
        )
    return [file_in(folder, name) for name in found]


@contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """Tensors of a folder.

    Raises
    ------
    FileNotFoundError, ValueError
        There are none, a file cannot be read, or its content does not match the index.
    """
    weights: dict[str, Stored] = {}
    with ExitStack() as opened:
        for path, promised in weight_files(folder).items():
            read = read_torch_file if path.suffix == ".bin" else _safetensors
            found = read(path, opened)
            if missing := sorted(set(promised) - found.keys()):
                raise ValueError(f"{path} has no {missing[0]:.200}, which the index says it has")
            for key in found.keys() & weights.keys():
                raise ValueError(f"{key:.200} is in {path.name} and in another shard")
            weights |= found
        yield weights
