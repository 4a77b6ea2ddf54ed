"""Sources of the grouped GEMM kernels, from the rows of csrc/cuda/variants.inc.

    python csrc/cuda/gemm/rows.py OUT [VARIANTS] [TABLE]

A source holds the launchers of a few rows of one family, dtype and weight format; launchers.c has
the table of them all. VARIANTS: a regular expression; rows whose name has no match of it are not
compiled, and plans that need one of them are refused. Files that stay equal keep their time.
"""

import re
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "variants.inc"
ROW = re.compile(
    r"^MOELORA_CUDA_GEMM\((?P<name>\w+), (?P<dtype>\w+), (?P<format>\w+), (?P<family>\w+),"
    r" (?P<block_m>\d+), (?P<block_n>\d+), \d+, (?P<stages>\d+), (?P<cluster>\d+)\)$",
    re.M,
)
TYPES = {"BF16": "__nv_bfloat16", "F16": "__half"}
LAUNCHERS = {
    "SM80": ("cuda/gemm/sm80/gemm.cuh", "LaunchSm80"),
    "SM90": ("cuda/gemm/sm90/launch.cuh", "LaunchSm90"),
}
# Of one source, so that the last compiler to finish does not run alone for long.
MOST_ROWS = {"SM80": 5, "SM90": 3}
MADE = "/* Made by csrc/cuda/gemm/rows.py from csrc/cuda/variants.inc. */\n"
LAUNCHER = """
moelora_status moelora_cuda_{name}(const moelora_gemm_launch *g,
                                   const moelora_projection_plan *plan, const moelora_exec *exec) {{
  return {launch}<MOELORA_KERNEL_{format}, {type}, {block_m}, {block_n}, {stages},
                  {cluster}>::run(g, plan, exec);
}}
"""
TABLE_OF_LAUNCHERS = """#include "cuda/gemm/launchers.h"

moelora_gemm_launcher *const moelora_cuda_gemm_launchers[MOELORA_CUDA_ROWS] = {{
{entries}}};
"""


def rows(table: str, variants: str = "") -> list[dict[str, str]]:
    """Those whose names match."""
    try:
        pattern = re.compile(variants)
    except re.error as error:
        raise SystemExit(
            f"MOELORA_VARIANTS is {variants!r}, expected a regular expression: {error}"
        ) from None
    found = [row.groupdict() for row in ROW.finditer(table) if pattern.search(row["name"])]
    if variants and not found:
        raise SystemExit(f"MOELORA_VARIANTS is {variants!r}, which no GEMM variant matches")
    return found


def sources(found: list[dict[str, str]]) -> dict[str, str]:
    """Texts by path below the folder of generated sources, those that compile longest first."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in found:
        groups.setdefault((row["family"], row["dtype"], row["format"]), []).append(row)
    texts = {}
    for (family, dtype, kernel_format), members in sorted(groups.items(), reverse=True):
        header, launch = LAUNCHERS[family]
        count = -(-len(members) // MOST_ROWS[family])
        for part in range(count):
            name = f"gemm_{dtype}_{kernel_format}_{part + 1}".lower()
            texts[f"cuda/gemm/{family.lower()}/{name}.cu"] = (
                f'{MADE}#include "{header}"\n'
                + "".join(
                    LAUNCHER.format(**row, launch=launch, type=TYPES[dtype])
                    for row in members[part::count]
                )
            )
    entries = "".join(f"    [CUDA_{row['name']}] = moelora_cuda_{row['name']},\n" for row in found)
    texts["cuda/gemm/launchers.c"] = MADE + TABLE_OF_LAUNCHERS.format(entries=entries)
    return texts


def write(out: Path, variants: str = "", table: Path = TABLE) -> list[Path]:
    """The sources in `out`, and no others there; their paths in the order of `sources`."""
    texts = {out / path: text for path, text in sources(rows(table.read_text(), variants)).items()}
    for old in [*out.rglob("*.cu"), *out.rglob("*.c")]:
        if old not in texts:
            old.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return list(texts)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:3], *map(Path, sys.argv[3:4]))
