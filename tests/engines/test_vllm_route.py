"""`POST /v1/moelora/adapters`: what `update_adapters` does, for `vllm serve`."""

import asyncio
import importlib.util
import json
import re
from types import SimpleNamespace

import pytest
import torch
from stand_in import entry_point
from test_vllm_update import BAD, given, serves, shared, versions, vllm_update  # noqa: F401
from vllm_layer import HERE, load
from vllm_stand_in_engine import LLM

pytest_plugins = ["vllm_fixtures"]

PATH = "/v1/moelora/adapters"
FASTAPI = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("fastapi", "httpx"))), reason="FastAPI is not installed"
)


class Server:
    """`vllm serve` as far as an endpoint plugin meets it."""

    def __init__(self, client, **args):
        self.engine = LLM(workers=2).llm_engine.awaited()
        self.loras = {}
        models = SimpleNamespace(lora_requests=self.loras, is_base_model=lambda n: n == "base")
        self.state = SimpleNamespace(openai_serving_models=models)
        name = "moelora_adapters"  # not "moelora", which alone adds no route
        plugin = entry_point("vllm.endpoint_plugins", name).load()()
        assert plugin.name == name
        self.post = self._fastapi(plugin) if client == "fastapi" else self._asgi(plugin)
        self.plugin, self.args = plugin, SimpleNamespace(**{"api_server_count": 1} | args)
        self.start()

    def start(self):
        asyncio.run(self.plugin.init_state(self.engine, self.state, self.args))

    def _fastapi(self, plugin):
        from fastapi import FastAPI
        from fastapi.testclient import TestClient

        app = FastAPI()
        plugin.attach_router(app)
        client = TestClient(app)
        assert client.get(PATH).status_code == 405

        def post(body):
            answer = client.post(PATH, content=body)
            return answer.status_code, answer.json()

        return post

    def _asgi(self, plugin):
        attached = []
        app = SimpleNamespace(add_route=lambda path, route, methods: attached.append(route))
        plugin.attach_router(app)

        def post(body):
            cuts = [0, 4, 8, 9, 100, len(body)]
            parts = [body[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            left, sent = iter(parts), []

            async def receive():
                part = next(left)
                more = part is not parts[-1]
                return {"type": "http.request", "body": part, "more_body": more}

            async def send(message):
                sent.append(message)

            asyncio.run(attached[0]({"type": "http", "method": "POST"}, receive, send))
            self.left = len(list(left))
            start, answer = sent
            assert dict(start["headers"])[b"content-length"] == b"%d" % len(answer["body"])
            return start["status"], json.loads(answer["body"])

        return post


@pytest.fixture(params=["asgi", pytest.param("fastapi", marks=FASTAPI)])
def server(served, request):
    return Server(request.param)


def packed(adapters):
    return load(f"{HERE}.route").pack_adapters(adapters)


def test_versions_are_models_of_the_server(server):
    """`law` is the newest one, `law@1` stays as long as the engine serves it."""
    status, said = server.post(packed({"law": given(1), "code": given(2)}))
    assert (status, said) == (200, {"adapters": {"law": "law@1", "code": "code@1"}})
    server.engine.add_request("a", server.loras["law"])
    assert server.post(packed({"law": given(3)}))[1] == {"adapters": {"law": "law@2"}}
    server.engine.add_request("b", server.loras["law"])
    server.engine.add_request("c", server.loras["code@1"])
    found = server.engine.step()
    serves(found["a"], 1), serves(found["b"], 3), serves(found["c"], 2)
    server.engine.finish("a")
    server.post(packed({"law": given(4)}))
    server.post(packed({"law": given(5)}))
    assert sorted(server.loras) == ["code", "code@1", "law", "law@2", "law@3", "law@4"]
    assert versions(server.engine) == ["code@1", "law@2", "law@3", "law@4"]  # "b" runs on law@2


@pytest.mark.parametrize("bad", ["nan", "rank", "an expert less", "unknown"])
def test_what_a_worker_refuses_leaves_all_as_it_was(server, bad):
    server.post(packed({"law": given(1)}))
    value, why = BAD[bad]
    status, said = server.post(packed({"code": given(2), "law": value}))
    assert status == 400 and re.search(why, said["error"]["message"])
    assert sorted(server.loras) == ["law", "law@1"] and versions(server.engine) == ["law@1"]
    server.engine.add_request("a", server.loras["law"])
    serves(server.engine.step()["a"], 1)


def without_config():
    from safetensors.torch import save

    return save({"law/a": torch.zeros(1)})


def nested_config():
    from safetensors.torch import save

    return save({"law/a": torch.zeros(1)}, metadata={"law": "[" * 10**5})


BODIES = {
    "pickle": (lambda: torch.serialization.pickle.dumps(given(1)) * 9, "the body begins with"),
    "a path": (lambda: b'{"lora_path": "/tmp/law"}' * 9, "the body begins with"),
    "nothing": (lambda: b"", "no safetensors of pack_adapters"),
    "cut": (lambda: packed({"law": given(1)})[:-8], "no safetensors of pack_adapters"),
    "nested": (nested_config, "no safetensors of pack_adapters"),
    "config": (without_config, "a tensor 'law/a', and no configuration of 'law'"),
    "the model": (lambda: packed({"base": given(1)}), "'base': a model or LoRA of this name"),
    "a LoRA": (lambda: packed({"disk": given(1)}), "'disk': a model or LoRA of this name"),
}


@pytest.mark.parametrize("bad", BODIES)
def test_other_bodies_and_names_are_refused(server, bad):
    server.loras["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    body, why = BODIES[bad]
    status, said = server.post(body())
    assert status == 400 and why in said["error"]["message"]
    assert list(server.loras) == ["disk"] and versions(server.engine) == []
    if "begins" in why and hasattr(server, "left"):
        assert server.left  # it is not read to its end


def test_a_handle_of_shared_tensors_is_no_body(served):
    with pytest.raises(ValueError, match="'law': tensors is SharedTensors.*wanted tensors by name"):
        packed({"law": shared()})


def of_replicas(server):
    server.engine.vllm_config.parallel_config.data_parallel_size = 2


def of_servers(server):
    server.args.api_server_count = 2


def without_engine(server):
    server.engine = None


@pytest.mark.parametrize("wrong", [of_replicas, of_servers, without_engine])
def test_a_server_that_an_update_would_reach_in_part_says_so(server, wrong):
    wrong(server)
    server.start()
    status, said = server.post(packed({"law": given(1)}))
    assert status == 503 and ("set it 1" in said["error"]["message"] or wrong is without_engine)
    assert not server.loras
