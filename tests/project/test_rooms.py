"""Which rooms of the package a room may import: without a circle, each can be read alone."""

import ast
import re
from graphlib import TopologicalSorter

from checkout import ROOT

LEFT = {"operators"}
ENGINE = {"operators", "weights", "adapters", "integrations"}
ROOMS = {
    "_C": set(),
    "operators": {"_C"},
    "weights": LEFT,
    "adapters": {"_C", *LEFT},
    "training": {"operators", "adapters"},
    "reference": {"operators", "weights"},
    "integrations": {"_C", *LEFT},
    "integrations/vllm": {"_C", *ENGINE},
    "integrations/sglang": {"_C", *ENGINE} - {"adapters"},
    "integrations/transformers": {*ENGINE, "reference", "training", "integrations/vllm"}
    - {"integrations"},
    "integrations/peft": {"operators", "adapters", "integrations/transformers"},
    "integrations/trl": {"integrations/peft", "integrations/vllm"},
    "": {"_C", *ENGINE, "training", "integrations/vllm", "integrations/sglang"} - {"integrations"},
    "bench": {"", "_C", "operators", "weights", "reference"},
}
ROOMS["commands"] = {
    room for room in ROOMS if room not in ("integrations/peft", "integrations/trl")
}


def room_of(module):
    """Of a dotted name: that of its folder, "" for the root and what it exports."""
    names = module.split(".")[1:]
    at = next((k for k in (2, 1) if "/".join(names[:k]) in ROOMS and len(names) >= k), 0)
    return "/".join(names[:at])


def arrows():
    """(room, imported room, place) of all imports, those in functions and for types too."""
    for path in sorted((ROOT / "moelora").rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name.split(".")[0] == "moelora":
                    yield room_of(".".join(relative.parts)), room_of(name), f"{path}:{node.lineno}"


def test_a_room_imports_rooms_of_its_row():
    wrong = [f"{place}: {a} imports {b}" for a, b, place in arrows() if b not in {a, *ROOMS[a]}]
    assert not wrong, "\n".join(wrong)


def test_rooms_have_no_circle():
    assert set(TopologicalSorter(ROOMS).static_order()) == set(ROOMS)


def test_rows_name_only_rooms_that_are_imported():
    used = {(a, b) for a, b, _ in arrows() if a != b}
    assert {(a, b) for a in ROOMS for b in ROOMS[a]} - used == set()


def test_private_symbols_of_torch_stand_in_one_file():
    private = re.compile(r"(from |import )?torch(\.\w+)*(\.| import )_[a-zA-Z]")
    kinds = (ast.Attribute, ast.Import, ast.ImportFrom)
    for path in sorted((ROOT / "moelora").rglob("*.py")):
        if path.name == "torch_private.py" or "baselines" in path.parts:
            continue
        nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds))
        found = [f"{path}:{node.lineno}" for node in nodes if private.match(ast.unparse(node))]
        assert not found
