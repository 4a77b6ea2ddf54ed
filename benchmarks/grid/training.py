"""The grid's families of what trains."""

from __future__ import annotations

import torch
from cases import EDGE_CASES

import moelora
from benchmarks.grid.calls import BACK, each_dtype, filled, plans, present, rows, with_plans
from moelora.training import ProjectionGradients, fused_moe_lora_gemm_backward


def tensors(grads) -> tuple[torch.Tensor, ...]:
    values = [value for value in grads if value is not None]
    return tuple(t for v in values for t in (v if isinstance(v, list) else [v]))


def buffers(kind, arguments):
    """Gradients of all arguments in a `kind`, a class of gradients, to add to."""

    def like(value):
        return (
            [like(v) for v in value]
            if isinstance(value, list)
            else filled(*value.shape, like=value)
        )

    trained = {name: arguments.get(name) for name in kind._fields}
    return kind(**{name: like(value) for name, value in trained.items() if value is not None})


def gradients(device):
    """Saved tensors and all gradients of a layer: in new tensors, in float32, and accumulated into
    existing tensors. Also by autograd, whose backward overwrites what it saved, and the gradients
    of a projection, by autograd and accumulated.
    """

    def calls(device, spec):
        p = spec.build().to(device)
        arguments = present(p.kwargs())
        grad_out = filled(*p.hidden_states.shape, like=p.hidden_states)

        def backward(**options):
            _, saved = moelora.fused_experts_lora_saving(**arguments)
            grads = moelora.fused_experts_lora_backward(grad_out, saved, **arguments, **options)
            return (*saved, *tensors(grads))

        def onto():
            return backward(grads=buffers(moelora.Gradients, arguments), accumulate=True)

        def recorded():
            x = arguments["hidden_states"].detach().requires_grad_()
            with torch.enable_grad():
                out = moelora.fused_experts_lora(**arguments | {"hidden_states": x})
                out.backward(grad_out)
            return out.detach(), x.grad

        def projection():
            given = present(p.gemm_kwargs("w13"))
            x = given["x"].detach().requires_grad_()
            with torch.enable_grad():
                out = moelora.fused_moe_lora_gemm(**given | {"x": x})
                out.backward(filled(*out.shape, like=out))
            return out.detach(), x.grad

        def onto_projection():
            given = present(p.gemm_kwargs("w13"))
            rows = filled(*given["topk_ids"].shape, given["w"].shape[1], like=given["x"])
            to = buffers(ProjectionGradients, given)
            return tensors(fused_moe_lora_gemm_backward(rows, **given, grads=to, accumulate=True))

        ways = {
            "gradients": backward,
            "gradients, float32": lambda: backward(float32=True),
            "gradients, added": onto,
            "gradients, autograd": recorded,
            "gradients of a projection": projection,
            "gradients of a projection, added": onto_projection,
        }
        yield from with_plans(ways, plans(device, spec.dtype) + rows(device, spec.dtype, *BACK))

    yield from each_dtype(device, EDGE_CASES, calls)
