"""Small valid argument lists of every public and compiled operator, for tests of the boundary."""

from dataclasses import replace
from functools import cache

import torch
from backward_cases import converted
from cases import Spec
from delta_cases import PLAIN, Lists, base_output, columns_of, delta_kwargs
from quantized_cases import ALL_FORMATS, build, quantize
from torch.utils._python_dispatch import TorchDispatchMode

import moelora

M, TOP_K, E, K, I, R, LORAS = 6, 2, 4, 64, 64, 4, 2
VLLM = ("fused_moe_lora", "fused_moe_lora_shrink", "fused_moe_lora_expand")


def inputs(device="cpu", dtype=torch.float32, tokens=M):
    """Keyword arguments of fused_experts_lora with everything but expert_map present."""
    make = torch.Generator().manual_seed(7)

    def normal(*shape):
        return (torch.randn(*shape, generator=make) * 0.2).to(device, dtype)

    scores = torch.rand(tokens, E, generator=make).softmax(-1)
    topk_weights, topk_ids = scores.topk(TOP_K, dim=-1)
    return {
        "hidden_states": normal(tokens, K),
        "w13": normal(E, 2 * I, K),
        "w2": normal(E, K, I),
        "topk_weights": topk_weights.to(device),
        "topk_ids": topk_ids.to(device, torch.int32),
        "token_lora_mapping": (torch.arange(tokens) % (LORAS + 1) - 1).to(device, torch.int32),
        "w13_lora_a": [normal(LORAS, E, R, K), normal(LORAS, E, R, K)],
        "w13_lora_b": [normal(LORAS, E, I, R), normal(LORAS, E, I, R)],
        "w2_lora_a": normal(LORAS, E, R, I),
        "w2_lora_b": normal(LORAS, E, K, R),
        "lora_ranks": torch.tensor([R, R // 2], dtype=torch.int32, device=device),
        "lora_scalings": torch.tensor([2.0, 0.5], device=device),
        "adapter_enabled": torch.ones(LORAS, dtype=torch.bool, device=device),
        "w13_one_a": torch.zeros(LORAS, dtype=torch.int32, device=device),
        "w13_bias": normal(E, 2 * I),
        "w2_bias": normal(E, K),
    }


def vllm_calls(device, dtype):
    """Of vLLM's operators, in both forms."""
    p = replace(PLAIN, dtype=dtype).build().to(device)
    for form, naive in (("", False), (" naive", True)):
        lists = Lists(p, "w13", naive)
        out, rank = base_output(p, columns_of(p, "w13")).tensor, lists.a[0].size(2)
        h = lists.x.new_zeros(len(lists.a), *p.topk_ids.shape, rank)
        halves = lists.of_shrink(h, lists.a), lists.of_expand(out, h, lists.b)
        for name, of in zip(VLLM, (lists.of_fused(out), *halves), strict=True):
            yield name + form, of | {"num_experts": lists.num_experts}


def public_calls(device="cpu", dtype=torch.float32):
    """(function, valid arguments) of every public operator, by its name and, of some, a form."""
    given, spec = inputs(device, dtype), Spec(dtype=dtype).build().to(device)
    spec.adapter_enabled = given["adapter_enabled"]

    def zeros(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    one_expert = delta_kwargs(spec, "w13")
    one_expert |= {k: [t[:, :1] for t in one_expert[k]] for k in ("lora_a", "lora_b")}
    one_expert |= {"num_experts": None, "expert_map": None}
    routing = {"topk_ids": given["topk_ids"], "num_experts": E, "block_size": 4}
    ids = {"expert_ids": given["topk_ids"], "weight_indices": given["token_lora_mapping"]}
    ids |= {"lora_ranks": given["lora_ranks"], "adapter_enabled": given["adapter_enabled"]}
    weighted = {"routing_weights": given["topk_weights"], "scalings": given["lora_scalings"]}
    a13, b13 = zeros(LORAS, E, R, K), zeros(LORAS, E, 2 * I, R)
    a2, b2 = given["w2_lora_a"], given["w2_lora_b"]
    h, activated = zeros(M, TOP_K, R), zeros(M, TOP_K, I)
    combined = {"output": zeros(M, K), "down_a": a2, "down_b": b2, **ids, **weighted}
    out, saved = moelora.fused_experts_lora_saving(**given)
    gemm, delta = spec.gemm_kwargs(), delta_kwargs(spec, "w13")
    grad_out = zeros(*spec.topk_ids.shape, spec.w13.size(1))
    align = {**routing, "token_lora_mapping": given["token_lora_mapping"], "max_loras": LORAS}
    lists = {
        "sorted_token_ids": zeros(LORAS, 24, dtype=torch.int32),
        "expert_ids": zeros(LORAS, 6, dtype=torch.int32),
        "num_tokens_post_pad": zeros(LORAS, dtype=torch.int32),
        "lora_ids": torch.arange(LORAS, dtype=torch.int32, device=device),
    }
    expert_map = torch.arange(E, dtype=torch.int32, device=device)
    calls = {
        "fused_experts_lora": {**given, "out": zeros(M, K)},
        "fused_experts_lora_saving": given,
        "fused_experts_lora_backward": {"grad_out": out, "saved": saved, **given},
        "fused_moe_lora_gemm": gemm,
        "fused_moe_lora_gemm_backward": {"grad_out": grad_out, **gemm},
        "moe_lora_gate_up_delta": delta,
        "moe_lora_gate_up_delta of one": one_expert,
        "moe_lora_down_delta": delta_kwargs(spec, "w2"),
        "moe_lora_delta_backward": {"grad_out": grad_out, **delta},
        "moe_align_block_size": {**routing, "expert_map": expert_map},
        "moe_lora_align_block_size": {**align, "adapter_enabled": given["adapter_enabled"]},
        "moe_lora_align_block_size of vllm": align | lists,
        "moe_sorting": {**routing, "topk_weights": given["topk_weights"]},
        "prepack_weights": {"w": given["w13"]},
        "moe_lora_a": {"x": zeros(M, K), "lora_a": a13, "out": h, **ids},
        "moe_lora_gate_up_b": {"intermediate_a": h, "gate_up_b": b13, "out": activated, **ids},
        "moe_lora_down_combine": {"activated": activated, **combined},
        "moe_lora_fused": {"x": zeros(M, K), "gate_up_a": a13, "gate_up_b": b13, **combined},
        **dict(vllm_calls(device, dtype)),
    }
    return {name: (getattr(moelora, name.split()[0]), of) for name, of in calls.items()}


def other_forms(device, dtype):
    """Runs public operators in forms that `public_calls` has not."""
    given, spec = inputs(device, dtype), Spec(dtype=dtype, bias=True).build().to(device)
    ids, gemm = given["topk_ids"], spec.gemm_kwargs(mul_routed_weight=True)
    mapping, weights = given["token_lora_mapping"], given["topk_weights"]
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    base = {name: given[name] for name in ("hidden_states", "w13", "w2")}
    base |= {"topk_weights": weights, "topk_ids": ids}

    moelora.moe_align_block_size(ids.long(), 16, E)
    options = {"mode": "segmented", "expert_map": expert_map}
    moelora.moe_lora_align_block_size(ids, mapping, E, 4, LORAS, **options)
    zeroed = torch.ones(M, K, device=device)
    moelora.moe_sorting(ids, weights, E, 4, out_to_zero=zeroed, expert_map=expert_map)
    product = moelora.fused_moe_lora_gemm(**gemm)
    moelora.fused_moe_lora_gemm(**gemm, out=product)
    moelora.fused_experts_lora(**given)
    moelora.fused_experts_lora(**base, activation="gelu")
    numbers = {"activation_alpha": 1.5, "activation_limit": 0.25}
    moelora.fused_experts_lora(**given, activation="swigluoai_uninterleave", **numbers)
    delta = delta_kwargs(spec, "w13", add_inputs=False, out=product.clone())
    moelora.moe_lora_gate_up_delta(**delta)

    # ---- backwards of some gradients, in float32, and into given memory ----
    some = ["w13_lora_a", "w2_lora_b", "w13_bias"]
    like = torch.zeros_like
    _, saved = moelora.fused_experts_lora_saving(**base, activation="gelu")
    grad_out = torch.ones_like(given["hidden_states"])
    backward = moelora.fused_experts_lora_backward
    backward(grad_out, saved, **base, activation="gelu")
    _, saved = moelora.fused_experts_lora_saving(**given)
    backward(grad_out, saved, **given, wanted=some, float32=True)
    into = {name: converted(given[name], like) for name in moelora.Gradients._fields}
    backward(grad_out, saved, **given, grads=moelora.Gradients(**into))
    into = moelora.Gradients(topk_weights=like(weights), w13_lora_b=into["w13_lora_b"])
    backward(grad_out, saved, **given, grads=into, accumulate=True)

    factors = {name: converted(gemm[name], torch.Tensor.float) for name in ("lora_a", "lora_b")}
    moelora.fused_moe_lora_gemm_backward(product, **gemm | factors)
    into = {name: converted(gemm[name], like) for name in ("x", "lora_a", "lora_b")}
    into = moelora.ProjectionGradients(**into)
    moelora.fused_moe_lora_gemm_backward(product, **gemm, grads=into, accumulate=True)
    delta = delta_kwargs(spec, "w13")
    options = {"wanted": ["x", "lora_a", "lora_b"], "float32": True}
    moelora.moe_lora_delta_backward(product, **delta, **options)
    pairs = torch.full((LORAS, E), -1, dtype=torch.int32, device=device)
    pairs[0, 1], pairs[1, 0] = 1, 0
    sparse = [b.new_zeros(2, *b.shape[2:]) for b in delta["lora_b"]]
    into = moelora.ProjectionGradients(lora_b=sparse)
    moelora.moe_lora_delta_backward(product, **delta, grads=into, pairs=pairs)


@cache
def quantized_problems(device):
    """w13 and w2 of MXFP4 and INT4 with zero points, and of FP8 with x and without."""
    spec = Spec(tokens=M, hidden=K, inter=I, bias=True, dtype=torch.bfloat16)
    pairs = ("mxfp4", "int4_g64_zp"), ("fp8_static_w8a8", "fp8_block")
    formats = ((ALL_FORMATS[name] for name in pair) for pair in pairs)
    return [build(spec, w13, spec.dtype, w2).to(device) for w13, w2 in formats]


def quantized_forms(device):
    """Packs weights, unpacks them, and multiplies by them."""
    for name in ("mxfp4", "nvfp4", "int4_g64_zp", "fp8_block"):
        stored = quantize(torch.ones(1, 2 * I, K), ALL_FORMATS[name])
        parts = {n: t for n, t in vars(stored).items() if isinstance(t, torch.Tensor)}
        parts = {n: t.to(device) for n, t in parts.items() if n != "of_rows"}
        replace(stored, **parts).pack(torch.bfloat16, "concatenated").unpack()
    for p in quantized_problems(device):
        product = moelora.fused_moe_lora_gemm(**p.gemm_kwargs())
        y = moelora.fused_experts_lora(**p.kwargs())
    moelora.fused_moe_lora_gemm(**p.gemm_kwargs(), out=product)
    moelora.fused_experts_lora(**p.kwargs(), out=y)


class Recorded(TorchDispatchMode):
    """The calls of compiled operators inside."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moelora":
            schema = func._schema.arguments
            passed = dict(zip((a.name for a in schema), args, strict=False)) | (kwargs or {})
            every = [passed.get(a.name, a.default_value) for a in schema]
            self.calls.append((func._schema.name.removeprefix("moelora::"), every))
        return func(*args, **(kwargs or {}))


def own_memory(value):
    """Absent tensors, which calls share, as tensors of their own."""
    if isinstance(value, list):
        return [own_memory(v) for v in value]
    is_absent = isinstance(value, torch.Tensor) and not value.numel()
    return value.clone() if is_absent else value


def op_calls(device="cpu", dtype=torch.float32):
    """(name, args) for torch.ops.moelora, each operator at least once: those of public calls."""
    quantized_problems(device)
    with Recorded() as record:
        for function, arguments in public_calls(device, dtype).values():
            function(**arguments)
        other_forms(device, dtype)
        quantized_forms(device)
    calls = [(name, [own_memory(value) for value in args]) for name, args in record.calls]
    args = next(args for name, args in calls if name == "fused_experts_lora_backward")
    over = [args[0], args[1].clone(), *args[2:]]  # which autograd calls, once it needs no more
    return [*calls, ("fused_experts_lora_backward_over", over)]


def operator(name):
    return getattr(torch.ops.moelora, name).default


def tensors_in(args):
    """(place, index in a list or None, tensor) of each tensor among an operator's arguments."""
    for place, value in enumerate(args):
        for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, torch.Tensor):
                yield place, index, item


def with_another(args, place, index, tensor):
    """The arguments with this tensor in that place."""
    value = args[place]
    if index is not None:
        tensor = [*value[:index], tensor, *value[index + 1 :]]
    return [*args[:place], tensor, *args[place + 1 :]]
