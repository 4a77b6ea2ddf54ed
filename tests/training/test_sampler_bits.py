"""What trains computes what has served: rows of a sampler's batches, all at once under autograd."""

import pytest
import torch
from cases import same_bits

import moelora
from moelora.bench.formats import FORMATS
from moelora.weights.quantized import QuantizedWeights

TOKENS = 5120
EXPERTS, TOP_K, HIDDEN, INTER, RANKS = 8, 2, 256, 128, (16, 8, 32)
BATCHES = 1, 3, 8, 24, 64, 256, 700  # tokens of a sampler's batches, in turns
FP8 = {"fp8_block, FP8 activations": "fp8", "fp8_block, 16-bit activations": "native"}
WEIGHTS = ("16 bits", *(name for name in FORMATS if name != "fp8_block"), *FP8)


def draw_weights(name, make, dtype):
    """w13 and w2 of a format."""
    sizes = (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    if name == "16 bits":
        device = make.device
        return [torch.randn(s, generator=make, device=device).to(dtype) * 0.06 for s in sizes]
    kind = FORMATS[name.partition(",")[0]]
    options = {"activations": FP8[name]} if name in FP8 else {}
    packed: list[QuantizedWeights] = []
    for gate_up, size in zip(({"gate_up": "concatenated"}, {}), sizes, strict=True):
        packed.append(kind.pack(*kind.draw(*size, make, dtype), **options, **gate_up))
    return packed


@pytest.mark.parametrize("weights", WEIGHTS)
def test_ten_thousand_rows(device, weights):
    dtype = torch.bfloat16
    make = torch.Generator(device).manual_seed(0)

    def normal(*size, std=1.0):
        return (torch.randn(size, generator=make, device=device) * std).to(dtype)

    w13, w2 = draw_weights(weights, make, dtype)
    at, rank = (len(RANKS), EXPERTS), max(RANKS)
    adapters = {
        "w13_lora_a": normal(*at, rank, HIDDEN, std=HIDDEN**-0.5),
        "w13_lora_b": normal(*at, 2 * INTER, rank, std=0.5 * rank**-0.5),
        "w2_lora_a": normal(*at, rank, INTER, std=INTER**-0.5),
        "w2_lora_b": normal(*at, HIDDEN, rank, std=0.5 * rank**-0.5),
        "lora_ranks": torch.tensor(RANKS, dtype=torch.int32, device=device),
        "lora_scalings": torch.tensor([2.0, 0.5, 1.0], device=device),
    }
    x = normal(TOKENS, HIDDEN)
    logits = torch.randn(TOKENS, EXPERTS, generator=make, device=device)
    topk_weights, ids = logits.softmax(-1).topk(TOP_K)
    mapping = torch.randint(-1, len(RANKS), (TOKENS,), generator=make, device=device)

    served, begin, turn = [], 0, 0
    while begin < TOKENS:
        some = slice(begin, begin + BATCHES[turn % len(BATCHES)])
        served.append(
            moelora.fused_experts_lora(
                *(x[some], w13, w2, topk_weights[some], ids[some]),
                token_lora_mapping=mapping[some],
                **adapters,
            )
        )
        begin, turn = some.stop, turn + 1
    factors = {
        n: v.requires_grad_() if "lora_a" in n or "lora_b" in n else v for n, v in adapters.items()
    }
    trained = moelora.fused_experts_lora(
        x, w13, w2, topk_weights, ids, token_lora_mapping=mapping, **factors
    )
    assert trained.requires_grad and ids.numel() > 10_000
    assert same_bits(trained.detach(), torch.cat(served))
