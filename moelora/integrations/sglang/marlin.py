"""Convert four-bit weights from Marlin's layout, which SGLang uses after loading, to rows.

Marlin stores words in tiles of 16 columns by 64 rows, in the order in which lanes of a warp read
them, and permutes scales within 64 rows. Both are inverted here without loss. Results are values
(N, K / 2) uint8, even columns in the low nibbles, and scales (N, K / group).

Source of the layout: `gptq_marlin_repack` and `marlin_permute_scales` of vLLM and SGLang.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DEPTH, ROWS = 16, 64  # of a tile
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # order of a lane's eight values in a word
GROUPED = tuple(i + 8 * j for i in range(8) for j in range(8))
# With one scale per row: in the order of a lane's accumulators.
SINGLE = tuple(2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25))
TENSOR_EXPONENT = {torch.float16: 14 - 7, torch.bfloat16: 126 - 7}  # of a tensor's scale


@functools.cache
def _tile() -> Tensor:
    """(1024,): position of each nibble of a tile's 128 words in the tile's (columns, rows)."""
    places = []
    for word in range(DEPTH * ROWS // 8):
        lane, warp = divmod(word, 4)
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        values = [(column + k, row + n) for n in (0, 8) for k in (0, 1, 8, 9)]
        places += [values[which][0] * ROWS + values[which][1] for which in NIBBLES]
    return torch.tensor(places)


def values(words: Tensor) -> Tensor:
    """Converts (K / 16, 2 N) int32 to (N, K / 2) uint8."""
    depth, rows = words.size(0), words.size(1) // 2
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    tiles = words.reshape(depth, rows // ROWS, -1, 1) >> shifts & 15
    plain = torch.empty(depth, rows // ROWS, DEPTH * ROWS, dtype=torch.uint8, device=words.device)
    plain[..., _tile().to(words.device)] = tiles.flatten(2).to(torch.uint8)
    numbers = plain.unflatten(2, (DEPTH, ROWS)).permute(1, 3, 0, 2).reshape(rows, -1)
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def scales(permuted: Tensor, single: bool = False) -> Tensor:
    """Converts (groups, N) to (N, groups); `single`: one group for all columns."""
    order = SINGLE if single else GROUPED
    inverse = torch.tensor(order, device=permuted.device).argsort()
    return permuted.reshape(-1, len(order))[:, inverse].reshape(permuted.shape).t().contiguous()


def e4m3_scales(permuted: Tensor) -> Tensor:
    """Converts (K / 16, N) bytes to (N, K / 16) e4m3.

    Marlin stores the upper byte of 2 x, with x the bits of 128 times the scale as float16: five
    bits of exponent and three of mantissa, without the sign.
    """
    halves = permuted.view(torch.uint8).to(torch.int16) << 7
    inverse = torch.tensor((0, 2, 1, 3), device=permuted.device)  # its own
    numbers = halves.view(torch.float16).reshape(-1, 4)[:, inverse].reshape(permuted.shape)
    return scales((numbers.float() / 2**7).to(torch.float8_e4m3fn).view(torch.uint8)).view(
        torch.float8_e4m3fn
    )


def tensor_scale(scale: Tensor) -> Tensor:
    """Tensor scales of experts, in float32; SGLang has rounded them to the activations' dtype."""
    return scale.float() * 2.0 ** -TENSOR_EXPONENT[scale.dtype]
