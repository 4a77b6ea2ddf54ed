"""Weight formats of the extension: the rows of csrc/formats.inc."""

from __future__ import annotations

from dataclasses import dataclass

from moelora import _C


@dataclass(frozen=True)
class WeightFormat:
    """A moelora_format. Its index in `FORMATS` is its code, in operators and in state dicts."""

    name: str
    kernel: str  # type of values, shared by several formats: `QuantizedWeights.format`
    group_rows: int  # rows of a tile by `group_columns` that share a scale
    group_columns: int
    has_zeros: bool
    bits: int  # per value
    tile_columns: int
    tile_bytes: int
    codes: tuple[float, ...]  # the numbers of 16 codes; none unless values have four bits

    @property
    def row_scales(self) -> bool:
        """Whether each row of an FP8 tile has its own scale."""
        return self.bits == 8 and self.group_rows == 1


FORMATS = tuple(
    WeightFormat(name, kernel.lower(), rows, columns, bool(zeros), bits, wide, size, codes)
    for name, kernel, rows, columns, zeros, bits, wide, size, codes in _C.formats()
)
CODES = {
    (f.kernel, f.group_columns, f.has_zeros, f.row_scales): code for code, f in enumerate(FORMATS)
}


def codes_of(kernel: str) -> tuple[float, ...]:
    """The numbers of 16 codes of a type of four bits."""
    return next(f.codes for f in FORMATS if f.kernel == kernel)


def code_of(kernel: str, group_columns: int, has_zeros: bool, row_scales: bool) -> int:
    """Code of the format with these properties.

    Raises
    ------
    ValueError
        There is no such format.
    """
    key = kernel, group_columns, has_zeros, row_scales
    if key not in CODES:
        has = "zero points" if has_zeros else "scales of rows" if row_scales else "no zero points"
        raise ValueError(f"no format of {kernel} has {has} and a scale for {group_columns} columns")
    return CODES[key]
