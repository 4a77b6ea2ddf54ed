"""Translate csrc/cuda, without the files that wrap PTX, to C++ for the engine.

Rewrites shared memory, launches in angle brackets, and loops that poll memory, which macros cannot
express. Unchanged files keep their modification time.

python prepare.py csrc/cuda build/emulation/cuda [ROWS]

ROWS: a regular expression; GEMM variants, of a backward too, whose name does not match are left out.
"""

import re
import sys
from pathlib import Path

DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
STATIC = re.compile(
    r"^( *)__shared__ (__align__\(\w+\) )?(typename [\w:]+|\w+(?:<[^;]*?>)?) ([^;]*);", re.M
)
GEMM_ROW = re.compile(r"^MOELORA_CUDA_(?:GEMM|BACK)\((\w+), .*\n", re.M)
SPIN = re.compile(r"^( *while \()([^;{}]*)\);$", re.M)  # without a body, or behind that of a `do`
LAUNCH = re.compile(r"\b(\w+(?:<[^<>;()]*>)?)<<<(.*?)>>>", re.S)


def static(match):
    indent, aligned, kind, names = match.groups()
    line = match.string.count("\n", 0, match.start())
    bare = re.findall(r"(?:^|, *)(\w+)", re.sub(r"\[[^;,]*?\](?=[,\[]|$)", "", names))
    struct = f"Shared{line}"
    return (
        f"{indent}struct {struct} {{ {aligned or ''}{kind} {names}; }};"
        f" {struct} &shared{line}_ = emulation::static_shared<{struct}>();"
        + "".join(f" auto &{name} = shared{line}_.{name};" for name in bare)
    )


def prepare(text):
    text = DYNAMIC.sub(r"\1 *const \2 = (\1 *)emulation::dynamic_shared();", text)
    text = STATIC.sub(static, text)
    text = SPIN.sub(r"\1(\2) && emulation::spin());", text)
    return LAUNCH.sub(r"emulated_launch(\1, \2)", text)


def main(source, target, rows=""):
    for path in source.rglob("*"):
        if path.suffix not in (".cu", ".cuh", ".h", ".inc") or "ptx" in path.parts:
            continue
        to = target / path.relative_to(source)
        text = prepare(path.read_text())
        if path.name == "variants.inc":
            text = GEMM_ROW.sub(lambda row: row[0] if re.search(rows, row[1]) else "", text)
        if not to.exists() or to.read_text() != text:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
