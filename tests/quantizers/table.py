"""The table of quantizers in docs/weight-formats.md, from results.json of `check_folders.py`.

python tests/quantizers/table.py --write
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "weight-formats.md"
BETWEEN = re.compile(r"(<!-- quantizers -->\n).*?(\n<!-- /quantizers -->)", re.S)
# By source: what runs the experts of a scheme in vLLM with the plugin. A class is one of the page's
# table of those that moelora takes over.
VLLM = {
    "INT4 of GPTQ": "AutoGPTQMoEMethod",
    "INT4 of AWQ": "AutoAWQMoEMethod",
    "INT4 (W4A16) of compressed-tensors": "CompressedTensorsWNA16MoEMethod",
    "FP8 of rows": "CompressedTensorsW8A8Fp8MoEMethod",
    "FP8 of blocks": "CompressedTensorsW8A8Fp8MoEMethod",
    "INT8 (W8A16) of compressed-tensors": "",
    "INT8 (W8A8) of compressed-tensors": "",
    "INT8 of GPTQ": "",
    "NVFP4 of compressed-tensors": "CompressedTensorsW4A4Nvfp4MoEMethod",
    "MXFP4 of compressed-tensors": "CompressedTensorsW4A4Mxfp4MoEMethod",
    "MXFP8 of compressed-tensors": "",
}
NOT_TRIED = "not tried"
WHERE = re.compile(r"^(refused|dequantized): (?P<layer>\S+): (?P<why>experts are .*?; .*?)(:|$)")


def results() -> dict:
    return json.loads((HERE / "results.json").read_text())


def table() -> str:
    from moelora.integrations.transformers.schemes import scheme_of

    found = results()
    rows = [(tool, scheme, row) for tool in found for scheme, row in found[tool].items()]
    names = list(dict.fromkeys(name for *_, row in rows for name in row["folders"]))
    lines = [
        f"| quantizer | scheme | {' | '.join(names)} | vLLM |",
        "| --- | --- | " + " | ".join("---" for _ in names) + " | --- |",
    ]
    notes: list[str] = []
    for tool, scheme, row in rows:
        cells = [_cell(row["folders"].get(name), notes) for name in names]
        engine = NOT_TRIED
        if "layer" in row:
            kind = scheme_of(row["settings"], row["layer"], row["parts"]).name
            if kind in VLLM:
                taken = VLLM[kind] and not _stays(row["settings"])
                engine = "moelora" if taken else "vLLM's own"
        lines.append(f"| {tool} | `{scheme}` | {' | '.join(cells)} | {engine} |")
    said = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *said])


def _stays(settings: dict) -> bool:
    """Whether `AutoGPTQMoEMethod` keeps a layer: of zero points, or in activation order."""
    is_gptq = settings["quant_method"] == "gptq"
    return is_gptq and bool(settings.get("desc_act") or not settings.get("sym", True))


def _cell(result: str | None, notes: list[str]) -> str:
    if result is None:
        return ""
    kind, _, why = result.partition(": ")
    if not why or kind == "not made":
        return kind
    match = WHERE.match(result)
    note = match["why"] if match else why
    if note not in notes:
        notes.append(note)
    return f"{kind} ({notes.index(note) + 1})"


def filled(page: str) -> str:
    return BETWEEN.sub(lambda match: match[1] + table() + match[2], page)


def differences(new: dict) -> list[str]:
    """Of the folders that both have; what a tool could not make is no difference."""
    found = []
    for tool, schemes in new.items():
        for scheme, row in schemes.items():
            old = results().get(tool, {}).get(scheme, {"folders": {}})["folders"]
            for name, result in row["folders"].items():
                was = old.get(name, "not there")
                if was != result and not result.startswith("not made"):
                    found.append(f"{tool} {scheme} {name}: {result}\n    was: {was}")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        different = differences(json.loads(Path(sys.argv[2]).read_text()))
        print("\n".join(different) or "as the table says")
        sys.exit(int(bool(different)))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print(table())
