"""Problems of a projection and of the deltas of adapters alone, and their gradients by autograd."""

from dataclasses import replace
from functools import partial

import torch
from cases import Spec
from delta_cases import DELTAS
from gradient_cases import by_autograd, flat, grad_like, leaf_gradients, leaves, on_cpu

import moelora
from moelora.reference import fused_moe_lora_gemm_backward_ref, naive_fused_moe_lora_gemm_backward
from moelora.reference.backward import TRAINED_OF_PROJECTION

FACTORS = ("lora_a", "lora_b")


def with_leaves(arguments):
    return leaves(arguments, TRAINED_OF_PROJECTION)


def grads_of(arguments, given):
    return leaf_gradients({n: given[n] for n in TRAINED_OF_PROJECTION if n in arguments})


def of_projection(arguments, grad_out):
    function = moelora.fused_moe_lora_gemm
    return by_autograd(arguments, grad_out, TRAINED_OF_PROJECTION, function)


def for_delta(projection, arguments):
    """The arguments of a delta, and the projection without weights that it is."""
    num_experts = arguments["w"].size(0)
    own = {n: v for n, v in arguments.items() if n not in ("w", "bias")}
    own["x"] = arguments["x"]
    reference = arguments | {"w": torch.zeros_like(arguments["w"]), "bias": None}
    return own | {"num_experts": num_experts}, reference


def samples(grads, reference, grad_out):
    reference, grad_out = on_cpu(reference), grad_out.cpu()
    want = flat(fused_moe_lora_gemm_backward_ref(grad_out, **reference))
    naive = flat(naive_fused_moe_lora_gemm_backward(grad_out, **reference))
    assert set(grads) == set(want)
    return {n: (grads[n], want[n], naive[n].double()) for n in want}


def of_delta(projection):
    return partial(by_autograd, names=TRAINED_OF_PROJECTION, function=DELTAS[projection])


def problem(device="cpu", projection="w13", mul=True, **options):
    """(arguments, grad_out) of a projection in bfloat16."""
    p = replace(Spec(tokens=40, ranks=(8, 16, 3), dtype=torch.bfloat16), **options).build()
    arguments = p.to(device).gemm_kwargs(projection, mul)
    columns = arguments["w"].size(1)
    return arguments, grad_like((*p.topk_ids.shape, columns), p.spec.dtype, device)


def as_projection(projection):
    """Gradients of the projection, or of its delta, of the same arguments."""

    def of_adapters(arguments, grad_out):
        return of_delta(projection)(for_delta(projection, arguments)[0], grad_out)

    return of_projection, of_adapters
