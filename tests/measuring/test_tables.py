"""Tables of the pages, and result files that this tree can repeat."""

import importlib.util
import re

import pytest
from checkout import needs_checkout
from vllm_names import VLLM

from benchmarks import ROOT, tables
from benchmarks.compare.__main__ import COMMANDS
from moelora import _C


def test_commands_of_result_files_are_there():
    for path in (tables.files.ROOT / "benchmarks/results").glob("*.json"):
        _, flag, module, *words = tables.files.read(path)[0]["command"].split()
        assert flag == "-m" and importlib.util.find_spec(module), path.name
        if module == "benchmarks.compare":
            assert words[0] in COMMANDS, path.name


def test_every_script_is_in_the_table():
    page = (ROOT / "docs/benchmarks.md").read_text()
    named = set(re.findall(r"`([\w -]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", page, re.M))))
    scripts = {p for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text()}
    scripts |= {p.parent for p in (ROOT / "benchmarks").glob("*/__main__.py")}
    wanted = {path.stem for path in scripts} - {"compare"} | {f"compare {c}" for c in COMMANDS}
    assert wanted <= named


@needs_checkout
def test_files_name_variants_of_this_tree():
    """What was measured of code that is gone is measured again, or taken out."""
    files = (ROOT / "benchmarks/results").glob("*.json")
    plans = (case.get("plan", "") for path in files for case in tables.files.read(path)[1])
    try:
        for variant in {name for plan in plans for name in re.findall(r"(?:\w+=)(\w+)", plan)}:
            _C.force_variant(variant)
    finally:
        _C.force_variant(None)


@needs_checkout
def test_adapters_for_vllm_are_of_models_whose_names_are_compared():
    """With vLLM's sources, by tests/engines/test_vllm_sources.py."""
    reached, named = tables.models.architectures(), tables.models.MODELS.values()
    of_pairs = [m for m in named if tables.models.of_vllm(m, reached) == "`--per-expert`"]
    assert {tables.models.AS.get(m.model_type, m.model_type) for m in of_pairs} <= VLLM.keys()


PAGES = "".join((ROOT / page).read_text() for page in tables.PAGES)
NAMES = set(", ".join(re.findall(r"^<!-- (?:site: )?(\w[\w ,-]*) -->$", PAGES, re.M)).split(", "))
COMPUTED = {"models", "training-memory", "several-gpus"}  # of no file


@needs_checkout
@pytest.mark.parametrize("name", sorted(NAMES - COMPUTED - tables.UNDATED))
def test_a_table_has_its_commits_and_dates(name):
    text = tables.section(name)
    said = re.search(r"\b[0-9a-f]{7,12}, 20\d\d-\d\d-\d\d", text)
    assert said or tables.NOT_MEASURED in text


def test_tables_of_cases_are_on_pages_and_so_are_the_commands_of_files():
    topics = {topic for topic, *_ in tables.TABLES.values()}
    topics |= {name.split()[1] for name in NAMES if " " in name}
    assert {*tables.TABLES, *(f"from {topic}" for topic in topics)} <= NAMES
