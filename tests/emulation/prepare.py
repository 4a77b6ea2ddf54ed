"""Translate csrc/cuda, without the files that wrap PTX, to C++ for the engine.

Rewrites shared memory and loops that poll memory, which macros cannot express. Unchanged files keep
their modification time.

python prepare.py csrc build/emulation/900/src [VARIANTS]

VARIANTS: a regular expression; GEMM variants whose name does not match are not built.
"""

import re
import sys
from pathlib import Path

DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
STATIC = re.compile(
    r"^( *)__shared__ (__align__\(\w+\) )?(typename [\w:]+|\w+(?:<[^;]*?>)?) ([^;]*);", re.M
)
SPIN = re.compile(r"^( *while \()([^;{}]*)\);$", re.M)  # without a body, or behind that of a `do`


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
    return SPIN.sub(r"\1(\2) && emulation::spin());", text)


def main(csrc, out, variants=""):
    sys.path.insert(0, str(csrc / "cuda/gemm"))
    import rows

    generated = out / "generated"
    rows.write(generated, variants, csrc / "cuda/variants.inc")
    target = out / "cuda"
    kept = set()
    for root in (csrc / "cuda", generated / "cuda"):
        for path in root.rglob("*"):
            if path.suffix not in (".cu", ".cuh", ".h", ".inc", ".c") or "ptx" in path.parts:
                continue
            to = target / path.relative_to(root)
            kept.add(to)
            text = prepare(path.read_text())
            if not to.exists() or to.read_text() != text:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_text(text)
    for path in target.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
