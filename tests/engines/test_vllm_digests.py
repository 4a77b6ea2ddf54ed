"""`moelora doctor --lora --server`: what a running vLLM holds is what the folder has."""

import asyncio
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_vllm_update import adapter, given
from vllm_layer import HERE, load
from vllm_stand_in_engine import LLM
from vllm_stand_in_lora import LAYERS, LINEAR, E, I, K

from moelora.adapters.config import LoraConfig
from moelora.adapters.digests import by_layer, fingerprint
from moelora.adapters.engine_rules import Fate, Model, fates
from moelora.adapters.layers import LinearLayer, MoELayer
from moelora.commands.doctor_server import _factor, compare

pytest_plugins = ["vllm_fixtures"]
EXPERTS = {name: MoELayer(name, E, K, I) for name in LAYERS}
MODEL = Model("olmoe", EXPERTS, {LINEAR: LinearLayer(LINEAR, K, K)}, len(LAYERS))


@pytest.fixture
def llm(served):
    """An engine of two ranks that hold the same, and run one adapter, of seed 1."""
    made = LLM(workers=2)
    update = load(f"{HERE}.update")
    made.request = update.update_adapters(made, {"law": given(1)})["law"]
    return made


@pytest.fixture
def server(llm):
    """Its address, over HTTP."""
    route = load(f"{HERE}.digests").DigestsRoute()
    engine = llm.llm_engine.awaited()
    models = SimpleNamespace(lora_requests={"law": llm.request})
    asyncio.run(route.init_state(engine, SimpleNamespace(openai_serving_models=models), None))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            said = []

            async def send(message):
                said.append(message)

            if self.path == sys.modules[f"{HERE}.digests"].PATH:
                asyncio.run(route({}, None, send))
            self.send_response(said[0]["status"] if said else 404)
            self.end_headers()
            self.wfile.write(said[1]["body"] if said else b"{}")

        def log_message(self, *args):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def asked(server, tmp_path, seed=1, change=None, name="law", **options):
    (config, tensors), _ = adapter(seed)
    if change is not None:
        change(tensors)
    folder = tmp_path / name
    folder.mkdir()
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", **config, "target_modules": sorted(config["target_modules"])}
    (folder / "adapter_config.json").write_text(json.dumps(config | options))
    found = fates("vllm", MODEL, {key: tuple(t.shape) for key, t in tensors.items()}, config)
    assert {fate.what for fate in found} == {"used"}
    return compare(server, str(folder), MODEL, found)


def test_a_server_that_holds_what_the_folder_has(server, tmp_path):
    lines, same = asked(server, tmp_path)
    assert same and lines == [
        f"{server}: law (slot 0, 0; {len(LAYERS)} layers) holds what the folder has"
    ]


def exchange(one, other):
    def change(tensors):
        for key in [key for key in tensors if one in key]:
            there = key.replace(one, other)
            tensors[key], tensors[there] = tensors[there], tensors[key]

    return change


def one_number(tensors):
    key = next(key for key in tensors if "layers.1" in key and "lora_B" in key)
    tensors[key][-1, -1] += 2**-20


DIFFERENT = {
    "another version": ({"seed": 2}, "0123"),
    "one number": ({"change": one_number}, "1"),
    "experts": ({"change": exchange("1.mlp.experts.2.", "1.mlp.experts.3.")}, "1"),
    "gate and up": ({"change": exchange("0.mlp.experts.1.gate", "0.mlp.experts.1.up")}, "0"),
    "the scaling": ({"lora_alpha": 1}, "0123"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_layers_that_differ_are_named(server, tmp_path, what):
    options, layers = DIFFERENT[what]
    lines, same = asked(server, tmp_path, **options)
    assert not same and "holds something else" in lines[0]
    assert lines[1:] == [f"  layers.{layer} has other factors" for layer in layers]


def test_what_is_in_the_slot_counts(llm, server, tmp_path):
    """Not what is in host memory: a slot that a later load has overwritten."""
    for worker in llm.llm_engine.workers:
        inner = worker.model_runner.lora_manager._adapter_manager
        inner.modules[LAYERS[1]].w2_lora_b_stacked[0][0, 2, 3, 1] += 1
        inner.modules[LINEAR].reset_lora(0)
    lines, same = asked(server, tmp_path)
    assert not same
    others = [f"  layers.{layer} has other factors" for layer in (0, 1)]
    assert lines[1:] == [*others, f"  the slot lacks {LINEAR}"]


def test_factors_that_no_module_uses_are_named(llm, server, tmp_path):
    for worker in llm.llm_engine.workers:
        inner = worker.model_runner.lora_manager._adapter_manager
        (model,) = inner._registered_adapters.values()
        model.loras["model.layers.0.mlp.wrong"] = model.loras.pop(LINEAR)
    lines, same = asked(server, tmp_path)
    assert not same and "  no module uses the factors of model.layers.0.mlp.wrong" in lines


def test_the_adapter_is_named(server, tmp_path):
    lines, same = asked(server, tmp_path, name="code")
    assert not same and lines == [f"{server}: there is no adapter 'code', only ['law']"]
    assert asked(f"{server}#law", tmp_path, name="other")[1]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("{}/other", "answers 404: start it with VLLM_PLUGINS=moelora,moelora_digests"),
        ("http://127.0.0.1:9", "cannot be read"),
        ("file:///etc/passwd", "wanted the address of a server"),
    ],
)
def test_a_server_that_does_not_say(server, tmp_path, address, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        asked(address.format(server), tmp_path)


def test_fingerprints_do_not_see_padding_and_stacks():
    draws = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 3, 5, generator=draws, dtype=torch.bfloat16)
    padded = torch.zeros(4, 8, 6, dtype=torch.bfloat16)
    padded[:, :3, :5] = whole
    one = fingerprint(whole, "up A")
    assert one == fingerprint(padded, "up A")
    parts = [fingerprint(t, "up A", n) for n, t in enumerate(whole)]
    assert by_layer([("layers.3.x", one)]) == by_layer([("a.layers.3.y", p) for p in parts])
    for changed in (whole.flip(0), whole.flip(1), whole.flip(2), -whole):
        assert fingerprint(changed, "up A") != one
    assert fingerprint(whole, "gate A") != one


def test_stacks_of_experts_are_what_vllm_holds(served):
    """PEFT's (E r, in) and (out, r E) against (E, r, in) and (E, out, r) of its 3D layers."""

    class FusedMoE3DWithLoRA(SimpleNamespace):
        pass

    name, rank = LAYERS[0], 2
    model = Model("qwen3_5_moe_text", {name: MoELayer(name, E, K, I)}, {}, 1)
    config = LoraConfig.parse({"r": rank, "lora_alpha": 2 * rank, "peft_type": "LORA"})
    draws = torch.Generator().manual_seed(0)
    module, sums = FusedMoE3DWithLoRA(), []
    for stack, part, wide, tall in (("w13", ".base_layer", K, 2 * I), ("w2", "", I, K)):
        a = torch.randn(E, rank, wide, generator=draws)
        b = torch.randn(E, tall, rank, generator=draws)
        setattr(module, f"{stack}_lora_a_stacked", (a[None],))
        setattr(module, f"{stack}_lora_b_stacked", (2 * b[None],))
        for side, factor in (("A", a.flatten(0, 1)), ("B", b.permute(1, 2, 0).flatten(1))):
            key = f"base_model.model.{name}{part}.lora_{side}.weight"
            fate = Fate(key, "used", name)
            sums.append(_factor(factor, fate, model, config, torch.float32))
    held = [fingerprint(t, what) for what, t in load(f"{HERE}.digests")._stacks(module, 0)]
    assert sorted(held) == sorted(fingerprint(t, what, first) for what, first, t in sums)


def test_the_plugin_is_vllms_endpoint_plugin(served):
    """Loaded only if VLLM_PLUGINS names it, which the name of the other one does not."""
    route = load(f"{HERE}.digests").DigestsRoute()
    attached = []
    app = SimpleNamespace(add_route=lambda path, to, methods: attached.append((path, methods)))
    route.attach_router(app)
    assert attached == [("/v1/moelora/digests", ["GET"])]
    assert route.name == "moelora_digests" and route.required_tasks == ("generate",)
