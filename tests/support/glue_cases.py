"""Small valid argument lists of every compiled operator, for tests of the boundary itself."""

import torch

M, TOP_K, E, K, I, R, LORAS = 6, 2, 4, 64, 64, 4, 2


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


def quantized_calls(device):
    """Calls that take or make tiles, of MXFP4 w13 and of INT4 w2 with zero points."""
    make = torch.Generator().manual_seed(8)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=make, dtype=torch.uint8).to(device)

    given = inputs(device, torch.bfloat16)
    absent = torch.empty(0, device=device)
    blocks, scales = numbers(0, 256, E, 2 * I, K // 2), numbers(118, 124, E, 2 * I, K // 32)
    values, zeros = numbers(0, 256, E, K, I // 2), numbers(0, 16, E, K, I // 64)
    scales16 = numbers(40, 80, E, 2 * I, K // 16)
    steps = torch.full((E, K, I // 64), 0.02, device=device)
    tiles13, tiles2 = numbers(0, 1, E, 2, 1, 2176), numbers(0, 1, E, 1, 1, 2240)
    w13, w2 = [given["w13_lora_a"], given["w13_lora_b"]], [given["w2_lora_a"], given["w2_lora_b"]]
    routing = (given["topk_weights"], given["topk_ids"], given["token_lora_mapping"])
    adapters = (given["lora_ranks"], given["lora_scalings"], given["adapter_enabled"])
    experts = (
        *(given["hidden_states"], tiles13, tiles2, *routing, *w13, *([f] for f in w2), *adapters),
        *(given["w13_one_a"], given["w13_bias"], given["w2_bias"], 0, 0.0, 0.0, absent, False),
        *(1, 1, 2 * I, 0, 0.0, 4, K),
    )
    gemm = (
        *(given["hidden_states"], tiles13, *routing, *w13, *adapters, given["w13_bias"]),
        *(absent, True, 1, 0, 2 * I),
    )
    fp8, steps8 = numbers(0, 127, E, 2 * I, K), torch.full((E, 1, 1), 0.02, device=device)
    layout8 = (6, 0, 2 * I, 1, 0.0)
    experts8, tiles8_2 = (1, 1, 2 * I, 0, 0.0, 8, K, 3, 0.25), numbers(0, 1, E, 1, 1, 8448)
    tiles8 = numbers(0, 1, E, 2, 1, 8208)
    return [
        ("fused_moe_lora_gemm", gemm),
        ("fused_moe_lora_gemm", (gemm[0], tiles8, *gemm[2:-3], *layout8)),
        ("fused_moe_lora_gemm_out", (*gemm[:-3], gemm[0].new_empty(M, TOP_K, 2 * I), *gemm[-3:])),
        ("fused_experts_lora", experts),
        ("fused_experts_lora", (*experts[:2], tiles8_2, *experts[3:-7], *experts8)),
        ("fused_experts_lora_out", (*experts[:-7], gemm[0].new_empty(M, K), *experts[-7:])),
        ("pack_quantized", (blocks, scales, absent, absent, 1, 1, 0)),
        ("pack_quantized", (blocks, scales16, absent, steps8[:, 0], 9, 1, 0)),
        ("pack_quantized", (values, steps, zeros, absent, 4, 0, 1)),
        ("pack_quantized", (fp8, steps8, absent, absent, 6, 1, 0, 128, 128)),
        ("unpack_quantized", (tiles8, 6, 1, 2 * I, K, 1)),
        ("unpack_quantized", (tiles13, 1, 2, 2 * I, K, 0)),
        ("unpack_quantized", (tiles2, 4, 0, K, I - 2, 1)),
    ]


def training_calls(experts, base):
    """Calls of the operators of a layer's backward."""
    x = experts[0]
    grad_out, gate_up = torch.ones_like(x), x.new_full((M * TOP_K, 2 * I), 0.5)
    shrinks = x.new_full((M * TOP_K, 2, R), 0.25), x.new_full((M * TOP_K, R), 0.25)
    before, none = (grad_out, gate_up, *shrinks, *experts), x.new_empty(0)
    into = [torch.zeros_like(x), torch.zeros_like(experts[3])]
    into += [[torch.zeros_like(t) for t in factors] for factors in experts[6:10]]
    into += [torch.zeros_like(bias) for bias in experts[14:16]]
    some = [none.clone(), into[1].clone(), [], [torch.zeros_like(t) for t in experts[7]], [], []]
    return [
        ("fused_experts_lora_saving", experts),
        ("fused_experts_lora_saving", base),
        ("fused_experts_lora_backward", (*before, 255, False)),
        ("fused_experts_lora_backward", (*before, 4 + 32 + 64, True)),
        ("fused_experts_lora_backward", (grad_out, gate_up, none, none, *base, 3, False)),
        ("fused_experts_lora_backward_over", (grad_out, gate_up.clone(), *before[2:], 255, False)),
        ("fused_experts_lora_backward_out", (*before, *into, none, False)),
        (
            "fused_experts_lora_backward_out",
            (*before, *some, none.clone(), none.clone(), none, True),
        ),
    ]


def op_calls(device="cpu", dtype=torch.float32):
    """(name, args) for torch.ops.moelora, each operator at least once."""
    given = inputs(device, dtype)
    absent = torch.empty(0, device=device)
    ids, weights, mapping = (given[k] for k in ("topk_ids", "topk_weights", "token_lora_mapping"))
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    adapters = (given["lora_ranks"], given["lora_scalings"], given["adapter_enabled"])
    gemm = (
        *(given["hidden_states"], given["w13"], weights, ids, mapping),
        *(given["w13_lora_a"], given["w13_lora_b"], *adapters, given["w13_bias"], absent, True),
    )
    experts = (
        *(given["hidden_states"], given["w13"], given["w2"], weights, ids, mapping),
        *(given["w13_lora_a"], given["w13_lora_b"], [given["w2_lora_a"]], [given["w2_lora_b"]]),
        *(*adapters, given["w13_one_a"], given["w13_bias"], given["w2_bias"]),
        *(0, 0.0, 0.0, absent, False),
    )
    a13, b13, a2, b2 = experts[6:10]
    routing = (weights, ids, mapping, *adapters, absent, E)
    stage, align = (ids, mapping, adapters[0], adapters[2], E), (ids, mapping, E, 4, LORAS)
    combine = (ids, weights, mapping, *adapters, E)
    x, h, rows = gemm[0], gemm[0].new_zeros(2, M, TOP_K, R), gemm[0].new_ones(M * TOP_K, I)
    wide, narrow = x.new_ones(M, TOP_K, 2 * I), x.new_ones(M, TOP_K, K)
    integers = {"dtype": torch.int32, "device": device}
    lists = [torch.zeros(LORAS, n, **integers) for n in (M * TOP_K * 4, M * TOP_K)]
    lists.append(torch.full((LORAS,), 4, **integers))
    lora_ids = torch.tensor([1, -1, 0], **integers)
    listed = (weights, *lists, mapping, TOP_K, lora_ids, torch.tensor([3]), adapters[2], E, 4)
    naive = (weights, absent, ids, absent, mapping, TOP_K, absent, torch.tensor([0]), absent, E, 4)
    fused = (a13[:1], [torch.cat(b13, 2)], a2, b2)
    base = (*experts[:5], absent, [], [], [], [], *[absent] * 6, 1, 0.0, 0.0, absent, False)
    clamped = (*experts[:16], 4, 1.5, 0.25, absent, False)
    return [
        ("moe_align_block_size", (ids, 4, E, absent)),
        ("moe_align_block_size", (ids.long(), 16, E, expert_map)),
        ("moe_lora_align_block_size", (*align, 1, adapters[2], absent)),
        ("moe_lora_align_block_size", (*align, 2, absent, expert_map)),
        ("moe_sorting", (ids, weights, E, 4, torch.ones(M, K, device=device), absent)),
        ("moe_sorting", (ids, weights, E, 4, absent.clone(), expert_map)),
        ("fused_moe_lora_gemm", gemm),
        ("fused_moe_lora_gemm_out", (*gemm, gemm[0].new_empty(M, TOP_K, 2 * I))),
        *projection_calls(gemm, wide),
        ("fused_experts_lora", experts),
        ("fused_experts_lora", base),
        ("fused_experts_lora", clamped),
        ("fused_experts_lora_out", (*experts, torch.empty_like(experts[0]))),
        ("prepack_weights", (given["w13"],)),
        *training_calls(experts, base),
        *quantized_calls(device),
        ("moe_lora_align_block_size_out", (*lists, *align, absent, lora_ids, absent)),
        ("fused_moe_lora", (wide, x, a13, b13, *listed, True, True, 0)),
        ("fused_moe_lora", (wide, x, a13, b13, *naive, False, False, 0)),
        ("fused_moe_lora_shrink", (h, x, a13, *listed)),
        ("fused_moe_lora_expand", (wide, h, b13, *naive, True, True, 0)),
        ("moe_lora_gate_up_delta", (wide, x, a13, b13, *routing, False, True)),
        ("moe_lora_down_delta", (narrow, rows, a2, b2, *routing, True, False)),
        ("moe_lora_a", (h[:1], x, fused[0], *stage)),
        ("moe_lora_gate_up_b", (x.new_ones(M, TOP_K, I), h[:1], fused[1], *stage)),
        ("moe_lora_down_combine", (torch.ones_like(x), rows, a2, b2, *combine)),
        ("moe_lora_fused", (torch.ones_like(x), x, *fused, *combine)),
    ]


def projection_calls(gemm, grad_out):
    """Backward of a projection, and of its adapters alone."""
    x, absent = gemm[0], gemm[0].new_empty(0)
    alone = (x, absent, *gemm[2:10], *[absent] * 2, False, E)
    a, b = gemm[5:7]
    of_a, of_b = ([torch.zeros_like(t) for t in factors] for factors in (a, b))
    pairs = torch.full((LORAS, E), -1, dtype=torch.int32, device=x.device)
    pairs[0, 1], pairs[1, 0] = 1, 0
    sparse = [t.new_zeros(1, 2, *t.shape[2:]) for t in b]
    float32 = (*gemm[:5], *([t.float() for t in factors] for factors in (a, b)), *gemm[7:])
    name = "fused_moe_lora_gemm_backward"
    return [
        (name, (grad_out, *gemm, 0, 31, False)),
        (name, (grad_out, *float32, 0, 31, False)),
        (name, (grad_out, *alone, 13, True)),
        (
            f"{name}_out",
            (grad_out, *gemm, 0, torch.empty_like(x), absent.clone(), of_a, of_b)
            + (absent.clone(), absent, True),
        ),
        (
            f"{name}_out",
            (grad_out, *alone, absent.clone(), absent.clone(), [], sparse)
            + (absent.clone(), pairs, False),
        ),
    ]


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
