"""moe_align_block_size, moe_lora_align_block_size, moe_sorting: equal to the lists, id by id."""

import pytest
import torch
from cases import EDGE_CASES, Spec, random_specs
from conftest import on_gpu

import moelora
from moelora.reference import (
    moe_align_block_size_ref,
    moe_lora_align_block_size_ref,
    moe_sorting_ref,
)

BLOCK_SIZES = (1, 4, 16, 64)
OPERATORS = moelora.moe_align_block_size, moelora.moe_lora_align_block_size, moelora.moe_sorting
REFERENCES = moe_align_block_size_ref, moe_lora_align_block_size_ref, moe_sorting_ref


def every_alignment(functions, device, topk_weights, zeroed=None, **arguments):
    """All outputs of the three functions; `arguments` are those of the one with adapters."""
    align, lora_align, sort = functions
    arguments |= {n: t.to(device) for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    ids, expert_map = arguments["topk_ids"], arguments["expert_map"]
    experts, block_size = arguments["num_experts"], arguments["block_size"]
    options = {"expert_map": expert_map} | ({} if zeroed is None else {"out_to_zero": zeroed})
    return [
        *align(ids, block_size, experts, expert_map=expert_map),
        *sort(ids, topk_weights.to(device), experts, block_size, **options),
        *lora_align(**arguments, mode="uniform"),
        *lora_align(**arguments, mode="segmented"),
    ]


def assert_same(got, expected):
    """Sizes, dtypes and every entry, padding and what lies past the end included."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert g.dtype == e.dtype and torch.equal(g.cpu(), e), f"output {i}"


def check_all(spec: Spec, block_size: int, device: str) -> None:
    p = spec.build()
    there = p.to(device)
    assert_same(
        every_alignment(OPERATORS, device, there.topk_weights, **there.align_kwargs(block_size)),
        every_alignment(REFERENCES, "cpu", p.topk_weights, **p.align_kwargs(block_size)),
    )


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, block_size, device):
    check_all(EDGE_CASES[name], block_size, device)


def test_random_problems(device):
    for spec in random_specs(150, first_seed=5000):
        check_all(spec, BLOCK_SIZES[spec.seed % len(BLOCK_SIZES)] + spec.seed % 3, device)


@pytest.mark.parametrize(
    "tokens, top_k, experts, adapters",
    [(3000, 2, 8, 3), (700, 8, 128, 8), (40, 8, 1024, 1024), (257, 6, 64, 33)],
)
def test_large(tokens, top_k, experts, adapters, device):
    """More rows, experts and pairs than one thread block has threads."""
    ids = {"mix": "disabled", "routing": "out_of_range"}
    spec = Spec(tokens, top_k, experts, hidden=1, inter=1, ranks=(1,) * adapters, **ids)
    check_all(spec, 16, device)


# ---- by hand ----


@pytest.fixture(params=["reference", "cpu", on_gpu("cuda")])
def sorts(request):
    """(alignment, that with adapters, sorting, device): of the reference, and operators."""
    if request.param == "reference":
        return *REFERENCES, "cpu"
    return *OPERATORS, request.param


# Composable Kernel's example: five tokens, top-3, six experts, blocks of four.
EXAMPLE = [[0, 3, 5], [2, 3, 5], [1, 3, 5], [1, 2, 3], [1, 3, 5]]
X = 15  # padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sorting_example(dtype, sorts):
    *_, sort, device = sorts
    ids = torch.tensor(EXAMPLE, dtype=torch.int32, device=device)
    weights = torch.arange(15, dtype=torch.float32, device=device).view(5, 3) + 1
    out = torch.full((5, 3, 33), 7.0, dtype=dtype, device=device)
    around = out.clone()
    tokens, sorted_weights, experts, padded = sort(ids, weights, 6, 4, out_to_zero=out[1:4])
    assert padded.tolist() == [28]
    assert tokens.tolist()[:28] == (
        [0, X, X, X, 2, 3, 4, X, 1, 3, X, X, 0, 1, 2, 3, 4, X, X, X, X, X, X, X, 0, 1, 2, 4]
    )
    assert sorted_weights.tolist()[:28] == (
        [1, 0, 0, 0, 7, 10, 13, 0, 4, 11, 0, 0, 2, 5, 8, 12, 14, *[0] * 7, 3, 6, 9, 15]
    )
    assert experts.tolist()[:7] == [0, 1, 2, 3, 3, 4, 5]
    assert set(tokens.tolist()[28:]) == {X}
    assert set(experts.tolist()[7:]) == {-1}
    assert not out[1:4].any()
    assert torch.equal(out[0], around[0])
    assert torch.equal(out[4], around[4])


def test_align_example(sorts):
    align, *_, device = sorts
    rows, experts, padded = align(torch.tensor(EXAMPLE, dtype=torch.int32, device=device), 4, 6)
    assert padded.tolist() == [24]
    assert rows.tolist()[:24] == (
        [0, X, X, X, 6, 9, 12, X, 3, 10, X, X, 1, 4, 7, 11, 13, X, X, X, 2, 5, 8, 14]
    )
    assert experts.tolist()[:6] == [0, 1, 2, 3, 3, 5]
    assert set(rows.tolist()[24:]) <= {X}


def test_lora_align_example(sorts):
    """Two adapters over three experts; rows of the base come first, order by token is kept."""
    _, align, _, device = sorts
    ids = torch.tensor([[0, 1], [1, 0], [1, 2], [1, 0]], dtype=torch.int32, device=device)
    mapping = torch.tensor([1, -1, 1, 0], dtype=torch.int32, device=device)
    rows, experts, loras, padded = align(ids, mapping, 3, 2, 2)
    assert padded.tolist() == [14]
    assert rows.tolist()[:14] == [3, 8, 7, 8, 0, 8, 2, 8, 6, 8, 1, 4, 5, 8]
    assert experts.tolist()[:7] == [0, 0, 0, 1, 1, 1, 2]
    assert loras.tolist()[:7] == [-1, 0, 1, -1, 0, 1, 1]

    rows, experts, loras, padded = align(ids, mapping, 3, 2, 2, mode="segmented")
    assert padded.tolist() == [10]
    assert rows.tolist()[:10] == [3, 7, 0, 8, 2, 6, 1, 4, 5, 8]
    assert experts.tolist()[:5] == [0, 0, 1, 1, 2]
    assert loras.tolist()[:10] == [-1, 0, 1, -1, -1, 0, 1, 1, 1, -1]


def test_sorting_zeroes_large_and_empty_outputs(device):
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    weights = torch.ones(1, 1, device=device)
    for shape in ((1 << 20, 3), (0, 5), (1,), ()):
        out = torch.full(shape, float("nan"), device=device)
        moelora.moe_sorting(ids, weights, 1, 1, out_to_zero=out)
        assert out.numel() == int((out == 0).sum())


def test_work_is_linear_in_tokens():
    """A quadratic loop over 400 000 rows would take minutes; the sort takes milliseconds."""
    tokens = 100_000
    ids = torch.randint(0, 64, (tokens, 4), dtype=torch.int32)
    mapping = torch.randint(-1, 100, (tokens,), dtype=torch.int32)
    rows, _, _, padded = moelora.moe_lora_align_block_size(ids, mapping, 64, 16, 100)
    real = rows[rows < tokens * 4]
    assert torch.equal(real.sort().values, torch.arange(tokens * 4, dtype=torch.int32))
    assert padded.item() % 16 == 0
