"""The pass rule, and memory with guard bands."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Largest relative error of rounding a value to the dtype.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}

# How many roundings of the largest reference value are forgiven whatever the naive version did.
# A result that is right still rounds once, and the naive error of a handful of outputs may be zero
# by luck. For fp32 the floor, about 1e-6 of the scale, also covers another order of summation.
# Terms of a test problem have size TYPICAL, though the few outputs of a tiny one may all cancel.
FLOOR_ROUNDINGS = {torch.float32: 16, torch.bfloat16: 3, torch.float16: 3}
TYPICAL = 0.25
# The largest naive error of so few outputs is a matter of luck: the floor is doubled.
FEW_OUTPUTS = 64

NAIVE_FACTOR = 1.5
OUTER_RTOL, OUTER_ATOL = 5e-2, 1e-2


def assert_close_to_ref(
    y: Tensor,
    ref64: Tensor,
    naive: Tensor,
    dtype: torch.dtype,
    atol: float = OUTER_ATOL,
    steps: float = 0.0,
    rounded_to: torch.dtype | None = None,
) -> float:
    """Fail unless `y` is as accurate as the same computation done naively in its dtype.

    The rule is max|y - ref64| <= 1.5 * max|naive - ref64| + floor, where the floor is a few
    roundings of max(TYPICAL, max|ref64|) (see FLOOR_ROUNDINGS), and, as an outer fence that does
    not trust the naive version, |y - ref64| <= atol + 5e-2 |ref64| everywhere. `steps` is a share
    of max(TYPICAL, max|ref64|) that is forgiven, too: what steps of a coarse rounding may make.
    `rounded_to` is the dtype whose roundings are forgiven, by default that of `y`: a float32
    gradient of a bfloat16 layer is a sum of bfloat16 products.

    Returns the error of `y` over what the rule allows (at most 1).
    """
    assert y.dtype == dtype, f"result has dtype {y.dtype}, wanted {dtype}"
    assert y.shape == ref64.shape, f"result has shape {tuple(y.shape)}, not {tuple(ref64.shape)}"
    assert torch.isfinite(ref64).all(), "the reference itself is not finite: bad problem"
    if ref64.numel() == 0:
        return 0.0
    y64 = y.detach().cpu().double()
    assert torch.isfinite(y64).all(), _describe("not finite", ~torch.isfinite(y64), y64, ref64)

    error = (y64 - ref64).abs()
    naive_error = (naive.detach().cpu().double() - ref64).abs().max().item()
    scale = max(TYPICAL, ref64.abs().max().item())
    roundings = FLOOR_ROUNDINGS[rounded_to or dtype] * (2 if ref64.numel() < FEW_OUTPUTS else 1)
    floor = (roundings * UNIT_ROUNDOFF[rounded_to or dtype] + steps) * scale
    allowed = NAIVE_FACTOR * naive_error + floor
    worst = error.max().item()
    assert worst <= allowed, _describe(
        f"error {worst:.3e} > {allowed:.3e} = {NAIVE_FACTOR} * naive {naive_error:.3e} "
        f"+ {floor:.3e}",
        error > allowed,
        y64,
        ref64,
    )
    outside = error > atol + OUTER_RTOL * ref64.abs()
    assert not outside.any(), _describe("outside the fence", outside, y64, ref64)
    return worst / allowed


def assert_gemm_is_the_cpus(p, device: str) -> None:
    """Fail unless w13's projection of problem `p` on `device` is as accurate as on the CPU."""
    import moelora
    from moelora.reference import naive_fused_moe_lora_gemm

    y = moelora.fused_moe_lora_gemm(**p.to(device).gemm_kwargs("w13", False))
    arguments = p.gemm_kwargs("w13", False)
    cpu = moelora.fused_moe_lora_gemm(**arguments).double()
    assert_close_to_ref(y, cpu, naive_fused_moe_lora_gemm(**arguments), p.spec.dtype)


def _describe(what: str, bad: Tensor, y: Tensor, ref: Tensor) -> str:
    first = tuple(bad.nonzero()[0].tolist())
    count = int(bad.sum())
    return (
        f"{what}; {count} of {bad.numel()} elements, first at {first}: "
        f"got {y[first]:.6g}, reference {ref[first]:.6g}"
    )


@contextmanager
def naming(what: object):
    """What fails inside names the problem."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


GUARD_BYTES = 4096
GUARD_BYTE = 0xA5


@dataclass
class Guarded:
    """A tensor with a band of known bytes before and after it, itself full of NaN (or 0x5A)."""

    tensor: Tensor
    memory: Tensor  # uint8: band, tensor, band

    def check(self, name: str = "tensor") -> None:
        before, after = self.memory[:GUARD_BYTES], self.memory[-GUARD_BYTES:]
        for place, band in (("before", before), ("after", after)):
            touched = (band != GUARD_BYTE).nonzero()
            assert touched.numel() == 0, (
                f"{touched.numel()} bytes {place} {name} were overwritten, "
                f"the first at byte {touched[0].item()} of the band"
            )


def guarded_empty(shape, dtype: torch.dtype, device="cpu") -> Guarded:
    """Uninitialized-looking contiguous memory whose surroundings can be checked afterwards."""
    numel = 1
    for size in shape:
        numel *= size
    nbytes = numel * dtype.itemsize
    # torch aligns `memory`, and the band is a multiple of 256 bytes: the tensor is aligned too.
    memory = torch.full((2 * GUARD_BYTES + nbytes,), GUARD_BYTE, dtype=torch.uint8, device=device)
    inside = memory[GUARD_BYTES : GUARD_BYTES + nbytes]
    inside.fill_(0xFF if dtype.is_floating_point else 0x5A)
    return Guarded(inside.view(dtype).view(shape), memory)


def assert_unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Fail if an operator wrote to one of its inputs; NaN counts as equal to itself."""
    for name, value in before.items():
        same = torch.equal(value.nan_to_num(1e4), after[name].nan_to_num(1e4))
        assert same, f"input {name} was changed"


def freed(tensor: Tensor) -> Tensor:
    """A tensor like it whose storage holds nothing any more, as FSDP and offloading leave it."""
    result = tensor.clone()
    result.untyped_storage().resize_(0)
    return result


def beside_other_work(count):
    """Numbers of calls, while work of another stream takes SMs of the GPU from some of them."""
    square, side = torch.ones(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(count):
        if i % 3 == 0:
            with torch.cuda.stream(side):
                torch.mm(square, square)
        yield i


class largest_allocation(TorchDispatchMode):  # noqa: N801, a context manager
    """Records what operators of torch return inside: `nbytes` of the largest, off the meta device.

    Not of views, nor of arguments that are written in place; of expanded ones as much as there is.
    """

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {storage.data_ptr() for _, storage in _stored((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for nbytes, storage in _stored(out):
            if storage.data_ptr() not in before:
                self.nbytes = max(self.nbytes, min(nbytes, storage.nbytes()))
        return out


def _stored(tree):
    """Bytes and storages of tensors, off the meta device; of sparse ones those of their values."""
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            tensor = tensor._values() if tensor.is_sparse else tensor
            if not tensor.is_meta:
                yield tensor.nbytes, tensor.untyped_storage()
