"""`POST /v1/moelora/adapters` of `vllm serve`: `update_adapters` over HTTP.

    VLLM_PLUGINS=moelora,moelora_adapters vllm serve MODEL --enable-lora --max-lora-rank 16
    curl --data-binary @body.safetensors http://localhost:8000/v1/moelora/adapters
    {"adapters": {"law": "law@7"}}

vLLM (0.33) loads an endpoint plugin only if VLLM_PLUGINS names it; its `--api-key` guards this path
as all of /v1. The body is what `pack_adapters` returns: tensors and configurations in the form of
safetensors. Requests name `law` for the newest version, or `law@7`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from torch import Tensor

from moelora.adapters.files import host_copy
from moelora.integrations import shown
from moelora.integrations.vllm import store, update

PATH = "/v1/moelora/adapters"
CHECKED = 9  # bytes that tell safetensors from others: the length of the header, and its "{"


def pack_adapters(adapters: update.Adapters) -> bytes:
    """The body of a request that updates adapters of `vllm serve`.

    Parameters
    ----------
    adapters : mapping
        Of `update_adapters`.

    Returns
    -------
    bytes
        Of safetensors: each tensor is named after its adapter and a slash, and the metadata have
        each adapter's configuration as JSON.

    Raises
    ------
    ValueError
        A name or the form of an adapter is wrong.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    configs = {}
    for name, given in adapters.items():
        config, found = update.checked(name, given, handles=False)
        configs[name] = json.dumps(config)
        tensors |= {f"{name}/{key}": host_copy(tensor) for key, tensor in found.items()}
    return save(tensors, metadata=configs)


def unpack_adapters(body: bytes) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """What `pack_adapters` got. ValueError for bytes of another form."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        configs = {n: json.loads(text) for n, text in header.get("__metadata__", {}).items()}
    except (RecursionError, SafetensorError, ValueError) as error:
        raise ValueError(f"the body is no safetensors of pack_adapters ({shown(error)})") from None
    found: dict[str, tuple[dict[str, Any], dict[str, Tensor]]]
    found = {name: (config, {}) for name, config in configs.items()}
    for key, tensor in tensors.items():
        name, _, rest = key.partition("/")
        if name not in found:
            raise ValueError(
                f"the body has a tensor {key!r:.200}, and no configuration of {name!r}"
            )
        found[name][1][rest] = tensor
    if not found:
        raise ValueError("the body has no adapters")
    return found


class Route:
    """An endpoint plugin of vLLM, and the ASGI application of its path."""

    required_tasks = ("generate",)
    name: str
    path: str
    method: str
    _engine: Any = None
    _models: Any = None

    def attach_router(self, app: Any) -> None:
        app.add_route(self.path, self, methods=[self.method])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._engine = engine_client
        self._models = getattr(state, "openai_serving_models", None)


class AdaptersRoute(Route):
    name, path, method = "moelora_adapters", PATH, "POST"
    _problem: str | None = "the server is starting"

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        await super().init_state(engine_client, state, args)
        self._problem = None
        config = getattr(engine_client, "vllm_config", None)
        replicas = getattr(getattr(config, "parallel_config", None), "data_parallel_size", 1)
        for name, count in (
            ("--api-server-count", getattr(args, "api_server_count", None) or 1),
            ("--data-parallel-size", replicas),
        ):
            if count > 1:
                self._problem = f"{name} is {count}, and updates would reach one of them: set it 1"
        if engine_client is None or self._models is None:
            self._problem = "this server has no engine"

    async def __call__(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        try:
            status, said = 200, {"adapters": await self._update(await _body(receive))}
        except ValueError as refusal:
            status, said = 400, {"error": {"message": str(refusal), "code": 400}}
        except RuntimeError as error:
            status, said = 503, {"error": {"message": str(error), "code": 503}}
        await reply(send, status, said)

    async def _update(self, body: bytes) -> dict[str, str]:
        """Name -> name of the version."""
        if self._problem:
            raise RuntimeError(self._problem)
        adapters = await asyncio.to_thread(unpack_adapters, body)
        served = self._models.lora_requests
        for name in adapters:
            path = getattr(served.get(name), "lora_path", store.PREFIX)
            if self._models.is_base_model(name) or not path.startswith(store.PREFIX):
                raise ValueError(f"adapter {name!r}: a model or LoRA of this name is served")
        new = await update.update_adapters_async(self._engine, adapters)
        for name, request in [*served.items()]:
            if update.has_left(request):
                del served[name]
        for name, request in new.items():
            served[name] = served[request.lora_name] = request
        return {name: request.lora_name for name, request in new.items()}


async def reply(send: Callable[[Any], Awaitable[None]], status: int, said: Any) -> None:
    """Answer a request of ASGI with JSON."""
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes:
    """The body of a request; ValueError before all of it is read if it is no safetensors."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the client has left")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        if len(parts) <= CHECKED and (start := b"".join(parts)[:CHECKED])[8:] not in (b"", b"{"):
            raise ValueError(f"the body begins with {start!r}, wanted safetensors of pack_adapters")
    return b"".join(parts)
