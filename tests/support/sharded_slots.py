"""Slots in a model that is built as RL trainers build theirs, in each of two processes.

As in verl 0.9 and SkyRL 0.3 only rank 0 reads the weights, and other ranks have the meta device;
FSDP2 shards, gathers parameters in a dtype of its own, and gets what rank 0 has.
"""

import sys

import torch
import torch.distributed as dist
from demo_data import MODEL_DIR
from ranks import say
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import moelora.integrations.transformers as mt
from moelora.training import LoraSlot, set_adapters

SLOTS, RANK = 2, 4
TEXTS = b"def f(x): return", b"import os, sys, ", b"class A(B): pass", b"0x0041, # LATIN "


def made(dtype, meta=False):
    config = AutoConfig.from_pretrained(MODEL_DIR, experts_implementation="grouped_mm")
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, config=config, dtype=dtype)
    model.requires_grad_(False)
    mt.multi_lora(model, slots=SLOTS, max_rank=RANK)
    return model


def drawn():
    """(config, tensors) of an adapter for each slot."""
    model, draws = made(torch.float32), torch.Generator().manual_seed(0)
    for slot in (LoraSlot(model, n).open(rank=RANK, generator=draws) for n in range(SLOTS)):
        for parameter in slot.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=draws)
        yield slot.tensors()


def sharded(dtype, param_dtype):
    model = made(dtype, meta=dist.get_rank() > 0)
    full = model.state_dict()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mp_policy=policy)
    model = model.to_empty(device="cpu") if dist.get_rank() else model.to("cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    for _, buffer in sorted(model.named_buffers()):
        dist.broadcast(buffer, src=0)
    return model


def gradients(model, rows):
    slots = [LoraSlot(model, n) for n in range(SLOTS)]
    for slot, (config, tensors) in zip(slots, drawn(), strict=True):
        slot.open(tensors, config=config)
    set_adapters(model, torch.arange(len(rows)) % SLOTS)
    model(rows, labels=rows, use_cache=False).loss.backward()
    found = (parameter.grad for slot in slots for parameter in slot.parameters())
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def main():
    """Prints how far gradients are from those of one process, by the weights' dtype."""
    dist.init_process_group("gloo")
    rows = torch.tensor([list(text) for text in TEXTS])
    for dtype, param_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        found = gradients(sharded(dtype, param_dtype), rows.chunk(2)[dist.get_rank()])
        alone = gradients(made(dtype), rows)
        far = [((f - w).norm() / w.norm()).item() for f, w in zip(found, alone, strict=True)]
        say(f"rank {dist.get_rank()} {dtype} {max(far)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
