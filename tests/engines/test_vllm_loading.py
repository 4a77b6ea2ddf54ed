"""Adapter files with a pair for each expert: read into stacks, served as vLLM's reading serves."""

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vllm_update import given, serves
from vllm_layer import HERE, load
from vllm_stand_in_engine import LLM
from vllm_stand_in_lora import LAYERS, LINEAR, E

pytest_plugins = ["vllm_fixtures"]
UP = f"base_model.model.{LAYERS[1]}.{E - 1}.up_proj"
OWN = "vLLM reads an adapter by itself"
loading = None  # moelora.integrations.vllm.loading


@pytest.fixture(autouse=True)
def calls(vllm, monkeypatch):
    """Calls of vLLM's own `from_local_checkpoint`."""
    model, found = load("vllm.lora.lora_model").LoRAModel, []
    own = model.from_local_checkpoint

    def from_local_checkpoint(lora_dir, expected_lora_modules, peft_helper, **named):
        found.append(lora_dir)
        return own(lora_dir, expected_lora_modules, peft_helper, **named)

    monkeypatch.setattr(model, "from_local_checkpoint", from_local_checkpoint)
    vllm.register()
    monkeypatch.setattr(sys.modules[__name__], "loading", load(f"{HERE}.loading"))
    return found


@pytest.fixture
def folder(tmp_path):
    def folder(config, tensors):
        config = dict(config, target_modules=sorted(config["target_modules"]))
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / loading.FILE)
        return tmp_path

    return folder


@pytest.fixture
def worker():
    return LLM().llm_engine.workers[0]


def request(path):
    names = {"lora_name": "law", "lora_int_id": 1, "lora_path": str(path), "load_inplace": False}
    return SimpleNamespace(**names, is_3d_lora_weight=False)


@pytest.mark.parametrize("factors", [512, 3, 1])
def test_a_file_is_served_as_vllm_serves_it(worker, folder, calls, monkeypatch, factors):
    monkeypatch.setattr(loading, "FACTORS", factors)
    serves([worker.serve(request(folder(*given(1))))], 1)
    assert calls == []


def test_experts_are_stacks_before_vllm_merges(worker, folder, monkeypatch):
    pinned, platform = torch.cuda.is_available(), load("vllm.utils.platform_utils")
    monkeypatch.setattr(platform, "is_pin_memory_available", lambda: pinned)
    model = worker.model_runner.lora_manager._load_adapter(request(folder(*given(1))))
    assert set(model.loras) == {LINEAR, *LAYERS}
    for lora in model.loras.values():
        assert lora.scaling == 1
    factors = [f for name in LAYERS for f in (*model.loras[name].lora_a, *model.loras[name].lora_b)]
    assert all(len(factor) == E and factor.is_pinned() == pinned for factor in factors)


@pytest.mark.parametrize("most", [1 << 10, 7])
def test_reads_that_return_less(worker, folder, calls, monkeypatch, most):
    def preadv(descriptor, buffers, offset, preadv=os.preadv):
        part, left = [], most
        for buffer in buffers:
            part.append(buffer[:left])
            left -= len(part[-1])
        return preadv(descriptor, part, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    serves([worker.serve(request(folder(*given(1))))], 1)
    assert calls == []


@pytest.mark.parametrize("mode", [torch.inference_mode, contextlib.nullcontext])
def test_under_inference_mode_or_not(worker, folder, calls, mode):
    with mode():
        serves([worker.serve(request(folder(*given(1))))], 1)
    assert calls == []


def test_factors_of_another_dtype(worker, folder, calls):
    config, tensors = given(1)
    tensors = {k: t.bfloat16() if LINEAR in k else t for k, t in tensors.items()}
    found = worker.serve(request(folder(config, tensors)))
    own = {k: t.float() for k, t in tensors.items()}
    a, b = (own[f"base_model.model.{LINEAR}.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(found[LINEAR], config["lora_alpha"] / config["r"] * b @ a)
    assert calls == []


def test_a_part_of_the_layers(worker, folder, calls):
    config, tensors = given(1)
    tensors = {k: t for k, t in tensors.items() if LAYERS[0] not in k}
    found = worker.serve(request(folder(config, tensors)))
    assert calls == [] and all(found[k].any() == (LAYERS[0] not in k) for k in found)


def without(tensors, *keys):
    return {key: t for key, t in tensors.items() if key not in keys}


FORMS = {
    "an expert without a projection": lambda t: without(
        t, f"{UP}.lora_A.weight", f"{UP}.lora_B.weight"
    ),
    "a factor without the other": lambda t: without(t, f"{UP}.lora_B.weight"),
    "two ranks": lambda t: t | {f"{UP}.lora_A.weight": torch.ones(1, 16)},
    "a stack beside its experts": lambda t: (
        t
        | {f"base_model.model.{LAYERS[1]}.lora_{side}.weight": torch.ones(16, 16) for side in "AB"}
    ),
    "an unknown module": lambda t: t | {"base_model.model.head.lora_A.weight": torch.ones(1, 16)},
    "no factor": lambda t: t | {"base_model.model.embed.base_layer.weight": torch.ones(2, 16)},
    "integers": lambda t: t | {f"{UP}.lora_A.weight": torch.ones(2, 16, dtype=torch.int32)},
    "a factor twice": lambda t: (
        t | {f"{UP.removeprefix('base_model.model.')}.lora_A.weight": torch.ones(2, 16)}
    ),
    "no experts": lambda t: {k: v for k, v in t.items() if LINEAR in k},
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_are_vllms(worker, folder, calls, form, lines):
    config, tensors = given(1)
    path = folder(config, FORMS[form](tensors))
    with contextlib.suppress(Exception):  # which vLLM may refuse
        worker.serve(request(path))
    assert calls == [str(path)] and not any(OWN in line for line in lines)


def test_nothing_is_allocated_if_vllm_reads_a_module(worker, folder, monkeypatch, lines):
    config, tensors = given(1)
    last = {"base_model.model.tail.lora_A.weight": torch.ones(1, 16)}
    monkeypatch.setattr(loading, "_Stack", None)
    with pytest.raises(ValueError, match="expected target modules"):
        worker.serve(request(folder(config, tensors | last)))
    assert not any(OWN in line for line in lines)


def test_patterns_and_peft_stacks_are_vllms(worker, folder, calls):
    config, tensors = given(1)
    serves([worker.serve(request(folder(config | {"alpha_pattern": {"x": 8}}, tensors)))], 1)
    with pytest.raises(ValueError, match="3D MoE"):
        other = request(folder(*given(2, stacks=True)))
        worker.add_lora(SimpleNamespace(**vars(other) | {"lora_int_id": 2}))
    assert len(calls) == 2


def test_what_fails_is_read_by_vllm_and_said_once(worker, folder, calls, monkeypatch, lines):
    def preadv(*args):
        raise OSError("no such device")

    monkeypatch.setattr(os, "preadv", preadv)
    path = folder(*given(1))
    serves([worker.serve(request(path))], 1)
    worker.model_runner.lora_manager._load_adapter(request(path))
    assert len(calls) == 2 and [OWN in line for line in lines].count(True) == 1


def test_a_file_that_is_replaced_meanwhile_is_read_whole(worker, folder, calls, monkeypatch):
    import safetensors

    path, own = folder(*given(1)), safetensors.safe_open

    def safe_open(name, **named):
        other = {"first": torch.zeros(64)} | load_file(path / loading.FILE)
        save_file(other, path / "new")
        os.replace(path / "new", path / loading.FILE)
        return own(name, **named)

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    serves([worker.serve(request(path))], 1)
    assert calls == []


def test_a_file_that_is_cut_meanwhile_is_not_served(worker, folder, calls, monkeypatch):
    import safetensors

    path, own = folder(*given(1)), safetensors.safe_open

    def safe_open(name, **named):
        opened = own(name, **named)
        os.truncate(path / loading.FILE, os.path.getsize(path / loading.FILE) - 4)
        return opened

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    with pytest.raises(safetensors.SafetensorError):
        worker.serve(request(path))
    assert calls == [str(path)]
