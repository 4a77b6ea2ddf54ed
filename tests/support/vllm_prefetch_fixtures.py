"""Fixtures of the tests of prefetch: the plugin, its streams, and engines."""

import pytest
import torch
from vllm_layer import HERE, load
from vllm_streams import Engine, TwoStreams

from moelora.adapters import transfer


@pytest.fixture
def hooks(vllm):
    """The plugin with the switch, and its module of a worker's slots."""
    vllm.monkeypatch.setenv("MOELORA_VLLM_PREFETCH", "1")
    vllm.register()
    return load(f"{HERE}.activation")


@pytest.fixture
def streams(hooks, monkeypatch):
    found = TwoStreams()
    monkeypatch.setattr(hooks, "Streams", found)
    monkeypatch.setattr(transfer, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    return found


@pytest.fixture
def make(hooks, streams):
    def make(names, **options):
        engine = Engine(load(f"{HERE}.update"), names, **options)
        engine.streams = streams
        streams.advance("compute", "copies")  # those that were brought to free slots
        for worker in engine.workers:

            def launch(request, slot, worker=worker):
                read = lambda: engine.read.append((request.name, worker.products(slot)))  # noqa: E731
                streams.put("compute", None, read)

            worker.launch = launch
        return engine

    return make
