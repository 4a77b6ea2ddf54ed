"""What the processes of tests/huggingface/test_sharded_models.py run.

    parallel_cases.py FOLDER CASE ...

A case is "disagree", "refused" or "average"; or a mode, of two processes or of four, in which
adapters are served; or "train " and a mode.
FOLDER has a model, adapters, and what one process computes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from ranks import fails_on_last, same_on_all, work
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.distributed import DistributedConfig

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf
from moelora.integrations.peft.parallel import _Averaging
from moelora.training import Tenants

MODES = {
    "tp": {"tp_plan": "auto"},
    "tp and ep": {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)},
    "ep of two batches": {"distributed_config": DistributedConfig(fsdp_size=2, ep_size=2)},
}
TRAINED = MODES | {"fsdp of two batches": {"distributed_config": DistributedConfig(fsdp_size=2)}}
# Of four processes, which have two batches.
FOUR = {
    name: {"distributed_config": DistributedConfig(tp_size=2, **sizes)}
    for name, sizes in {
        "fsdp and tp": {"fsdp_size": 2},
        "replicas of tp and ep": {"dp_replicate_size": 2, "ep_size": 2},
        "fsdp, tp and ep": {"fsdp_size": 2, "ep_size": 2},
        "ep of all": {"fsdp_size": 2, "ep_size": 4},
    }.items()
}
OTHERS = ["disagree", "refused", "average"]
ROWS = ["a", None, "b", "a", "b", None]


def load(folder: Path, mode: str, **more: Any) -> Any:
    more = {"attn_implementation": "eager", "dtype": torch.float32} | more
    options = (TRAINED | FOUR).get(mode, {}) | more
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "model", **options).eval()


def close(got: torch.Tensor, expected: torch.Tensor, name: str = "", most: float = 2e-5) -> None:
    off = ((got - expected).norm() / expected.norm()).item()
    assert off < most, (name, off)


def mine(mode: str, values: Any) -> Any:
    """The rows of this process's batch."""
    if mode in ("tp", "tp and ep"):
        return values
    share = 2 if mode in FOUR else 1  # ranks that have the same batch
    count = len(values) // (dist.get_world_size() // share)
    return values[count * (dist.get_rank() // share) :][:count]


@torch.no_grad()
def serve(folder: Path, mode: str) -> None:
    """Mixed batches, changes of the pool, and `generate`."""
    expected = torch.load(folder / "expected")
    ids, rows = mine(mode, expected["ids"]), mine(mode, ROWS)
    model = load(folder, mode)
    options = {"max_loras": 3, "max_rank": 8, "targets": "all"}
    pool = moelora_hf.load_adapters(model, {"a": folder / "a"}, **options)
    assert pool.add("b", folder / "b") == 1
    close(model(ids, adapter_names=rows).logits, mine(mode, expected["mixed"]))
    close(model(ids).logits, mine(mode, expected["base"]))
    if mode in ("tp", "tp and ep"):  # others end at different lengths
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
        with torch.enable_grad():  # transformers then has DTensors in linear layers
            close(model(ids, adapter_names=rows).logits.detach(), expected["mixed"])
        with pool.hold(["a"]):  # the new version takes another slot
            assert pool.update("b", folder / "c") == 2
        close(model(ids, adapter_names=rows).logits, expected["updated"])
        got = model.generate(ids, adapter_names=rows, max_new_tokens=3, do_sample=False)
        assert torch.equal(got, expected["generated"])
        if not hasattr(model.config, "kv_lora_rank"):  # a batch of requests is refused there
            generate_batch(model, ids, rows, got)
    held = pool.describe()
    experts = [text for name, text in held.items() if name.endswith("experts")]
    axis = "intermediate" if mode in ("tp", "fsdp and tp") else "experts"
    size = 4 if mode == "ep of all" else 2
    part = f"{axis}, part {dist.get_rank() % size + 1} of {size}: "
    assert experts and all(text.startswith(part) for text in experts), experts
    bytes_of_one = torch.load(folder / "bytes")
    assert pool.memory_bytes() < bytes_of_one
    pool.remove("a")
    assert pool.names() == ["b"]
    with pytest.raises(KeyError, match="'a'"):
        model(ids, adapter_names=["a"] * len(ids))
    moelora_hf.unload_adapters(model)
    close(model(ids).logits, mine(mode, expected["base"]))


def generate_batch(model: Any, ids: torch.Tensor, rows: Any, expected: torch.Tensor) -> None:
    """Continuous batching, which the first process schedules for all."""
    of = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    sizes = {"num_blocks": 16, "max_batch_tokens": 64, "page_size": 32, "use_cuda_graph": False}
    options = {
        "generation_config": transformers.GenerationConfig(**of),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(**sizes),
    }
    results = model.generate_batch(ids.tolist(), adapter_names=rows, **options)
    got = [result.generated_tokens for result in results.values()]
    assert got == expected[:, ids.size(1) :].tolist(), got


@torch.no_grad()
def disagree(folder: Path) -> None:
    """Each difference is an error of both processes, and the model runs afterwards."""
    rank = dist.get_rank()
    model = load(folder, "tp")
    ids = torch.load(folder / "expected")["ids"]
    mine = folder / "ab"[rank]
    for adapters in ({"a": mine}, {"ab"[rank]: folder / "a"}, [[], [folder / "a"]][rank]):
        with pytest.raises(RuntimeError, match="disagree: .* on rank 0 and .* on rank 1"):
            moelora_hf.load_adapters(model, adapters)
    with fails_on_last(FileNotFoundError, "none"):
        moelora_hf.load_adapters(model, {"a": folder / ["a", "none"][rank]})
    pool = moelora_hf.load_adapters(model, {"a": folder / "a"}, max_loras=3, max_rank=16)
    with pytest.raises(RuntimeError, match="rank and scaling of .* on rank 0 and .* on rank 1"):
        pool.add("b", mine)
    with pytest.raises(RuntimeError, match="checksum of factors is .* on rank 0"):
        pool.update("a", folder / ["b", "c"][rank])
    with fails_on_last(FileNotFoundError, "none"):
        pool.add("b", folder / ["a", "none"][rank])
    with pytest.raises(RuntimeError, match="disagree: call is add of adapter 'b' on rank 0"):
        (pool.add if rank == 0 else pool.update)("ba"[rank], folder / "a")
    with pytest.raises(RuntimeError, match="adapters of rows of batch 0 is"):
        model(ids, adapter_names=[["a"], [None]][rank] * len(ids))
    with fails_on_last(KeyError, "'b'"):
        model(ids, adapter_names=["ab"[rank]] * len(ids))
    assert pool.names() == ["a"]
    model(ids, adapter_names=["a"] * len(ids))
    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    adapted = peft.get_peft_model(load(folder, "tp"), config)
    factor = next(p for name, p in adapted.named_parameters() if ".lora_" in name)
    factor.requires_grad_(rank == 0)
    with pytest.raises(RuntimeError, match="is trained, .* on rank 0 and frozen, .* on rank 1"):
        moelora_peft.attach(adapted)
    factor.requires_grad_()
    moelora_peft.attach(adapted)


def refused(folder: Path) -> None:
    """Each is one error of both processes, which leaves the model without adapters."""
    adapters = {"a": folder / "a"}
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    pipeline = {"distributed_config": DistributedConfig(pp_size=2)}

    def tenants(model: Any) -> Tenants:
        return Tenants(moelora_hf.load_adapters(model, adapters, max_rank=8, w13_slices=1))

    table: list[tuple[dict[str, Any], Any, str]] = [
        (pipeline, lambda m: moelora_hf.load_adapters(m, adapters), "pipeline parallel"),
        (pipeline, lambda m: moelora_peft.attach(peft.get_peft_model(m, config)), "pipeline paral"),
        (MODES["tp"], tenants, "Tenants does not train"),
        (TRAINED["fsdp of two batches"], tenants, "by FSDP.* Tenants does not train"),
    ]
    for options, call, words in table:
        model = load(folder, "", **options)
        with pytest.raises(NotImplementedError, match=words):
            call(model)
        assert not hasattr(model, "_moelora") or "Tenants" in words


def average(folder: Path) -> None:
    """Gradients are means over the batches, in whichever backward they are complete."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, inner, last = factors = [torch.ones(3, requires_grad=True) for _ in range(3)]
    averaging = _Averaging(init_device_mesh("cpu", (size,)))
    for factor in factors:
        averaging.watch(factor)

    def loss(scale: float, reentrant: bool | None, wrong: bool = False) -> torch.Tensor:
        x = first * scale
        plain = reentrant is None
        x = inner * x if plain else checkpoint(inner.mul, x, use_reentrant=reentrant)
        if wrong:
            x.register_hook(lambda grad: grad[:1])
        return (x * last).sum()

    for reentrant in (None, False, True):
        with pytest.raises(RuntimeError, match="hook"):
            loss(1.0, reentrant, wrong=True).backward()
        assert not averaging.complete
        for factor in factors:
            factor.grad = None
        for backwards in (1, 2):
            for _ in range(backwards):  # accumulates
                loss(rank + 1.0, reentrant).backward()
            mean = backwards * (size + 1) / 2
            for factor in factors:
                assert torch.equal(factor.grad, torch.full((3,), mean)), (reentrant, factor.grad)
                factor.grad = None


def gathered(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves and loads: factors, and the optimizer's state."""
    options = StateDictOptions(ignore_frozen_params=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def resume(model: Any, optimizer: Any, folder: Path) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(strict=False)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def step_on(model: Any, optimizer: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step, in two batches; returns its gradients."""
    for part in ids.chunk(2):  # gradient accumulation
        (model(part, labels=part, use_cache=False).loss / 2).backward()
    trained = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    grads = {name: gathered(factor.grad).clone() for name, factor in trained.items()}
    optimizer.step()
    optimizer.zero_grad()
    return grads


def counted(name: str, owner: Any = dist) -> Any:
    return mock.patch.object(owner, name, wraps=getattr(owner, name))


def train(folder: Path, mode: str) -> None:
    """Gradients and steps are those of one process, whose adapter two processes resume and save."""
    expected = torch.load(folder / "trained")
    ids = mine(mode, expected["ids"])
    torch.manual_seed(dist.get_rank())
    base = load(folder, mode)
    model = peft.PeftModel.from_pretrained(base, folder / "start", is_trainable=True)
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():  # as of processes that make an adapter with seeds of their own
        for name, factor in factors.items():
            if ".experts." in name and dist.get_rank() > 0 and mode != "ddp":
                factor.zero_()
    layers = moelora_peft.attach(model.train()).layers
    called = DistributedDataParallel(model) if mode == "ddp" else model
    optimizer = torch.optim.AdamW(factors.values(), lr=1e-2, foreach=False)
    for step in range(2):
        with (
            counted("all_gather_into_tensor") as gathers,
            counted("_coalescing_manager") as sums,
            counted("linear", torch.nn.functional) as products,
        ):
            grads = step_on(called, optimizer, ids)
        if step == 0:
            weights = [call.args[1] for call in products.call_args_list]
            assert weights and not any(hasattr(weight, "placements") for weight in weights)
            if mode in ("tp", "tp and ep"):  # FSDP gathers by the same function
                assert gathers.call_count == 2 * len(layers)  # of two backwards
            assert sums.call_count <= 4  # of factors that are split, and of others
            assert grads.keys() == expected["gradients"].keys()
            for name, grad in grads.items():
                close(grad, expected["gradients"][name], name)
        for name, factor in factors.items():  # equal bit for bit
            assert same_on_all(gathered(factor.detach())), name
    dcp.save(state_of(model, optimizer), checkpoint_id=folder / f"state of all, {mode}")
    stepped = {name: gathered(factor.detach()).clone() for name, factor in factors.items()}
    resume(model, optimizer, folder / "state of one")  # of before the second step
    assert not all(torch.equal(gathered(f.detach()), stepped[n]) for n, f in factors.items())
    step_on(called, optimizer, ids)
    for name, factor in factors.items():
        close(gathered(factor.detach()), stepped[name], name, 1e-3)
    out = folder / f"trained by all, {mode}"
    joined = {"autospec": True, "side_effect": DTensor.full_tensor}
    with mock.patch.object(DTensor, "full_tensor", **joined) as joins:
        model.save_pretrained(out, is_main_process=dist.get_rank() == 0)
    # None of the base model's weights.
    assert joins.call_count == sum(hasattr(factor, "placements") for factor in factors.values())
    dist.barrier()
    saved, of_one = (load_file(f / "adapter_model.safetensors") for f in (out, folder / "one"))
    assert saved.keys() == of_one.keys()
    for name, factor in of_one.items():
        close(saved[name], factor, name, 1e-3)  # steps of Adam magnify
    if mode != "ddp":  # which has the factors of before
        model.load_adapter(folder / "start", "late", is_trainable=True)
        model.set_adapter("late")
        late = [p for p in model.parameters() if p.requires_grad]
        for name, grad in step_on(model, torch.optim.SGD(late, 0.0), ids).items():
            close(grad, expected["gradients"][name.replace(".late.", ".default.")], name)
        model.set_adapter("default")
    with torch.no_grad():
        trained = model.eval()(ids).logits
        base = moelora_peft.detach(model) or model.unload()
        moelora_hf.load_adapters(base, {"saved": out})
        close(base(ids, adapter_names=["saved"] * len(ids)).logits, trained)


def main() -> None:
    folder = Path(sys.argv[1])
    transformers.logging.set_verbosity_error()

    def run(case: str) -> None:
        if case in OTHERS:
            globals()[case](folder)
        elif case.startswith("train "):
            train(folder, case.removeprefix("train "))
        else:
            serve(folder, case)

    work(run, sys.argv[2:])


if __name__ == "__main__":
    main()
