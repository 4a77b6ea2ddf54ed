"""Tables of the pages, and result files that this tree can repeat."""

import importlib.util
import json
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


def gone(case):
    """Variants of a case's plan that this tree does not have."""
    found = set()
    for variant in re.findall(r"(?:\w+=)(\w+)", case.get("plan", "")):
        try:
            _C.force_variant(variant)
        except ValueError:
            found.add(variant)
        finally:
            _C.force_variant(None)
    return found


@needs_checkout
def test_files_name_variants_of_this_tree():
    """What was measured of code that is gone is measured again, or taken out."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        assert set().union(*map(gone, tables.files.read(path)[1])) == set(), path.name


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


def rows_of(name):
    """Lines of a table without the spaces that align its columns."""
    return re.sub(" +", " ", tables.MADE[name]()).splitlines()


def test_ways_of_several_gpus_are_filled_from_their_files(tmp_path, monkeypatch):
    """The two engines of a way in a file of answers, and three in one of servers."""
    ours, theirs = runs = ("moelora data and expert", "vllm data and expert")
    same = {"topic": "answers", "requests": 6, "same_tokens": 6}
    answers = [{"topic": "distance", ours: far, theirs: 40 * far} for far in (0.04, 0.05)]
    for run, off in zip(runs, (0.0, 1.9), strict=True):
        row = {"compared": f"{run}: mixed, each alone", "prompt_median": off, "prompt_max": off}
        answers.append(same | row)
        bits = {"topic": "bits", "run": f"{run}, eager", "matched": 9}
        answers.append(bits | {"differing": 7 * (run == theirs)})
    load = {"workload": "decode_64", "concurrency": 64, "median_tpot_ms": 32.0}
    names = [("vllm without LoRA", 0), ("vllm + moelora", 4)]  # the third was not reached
    servers = [load | {"engine": name, "adapters": adapters} for name, adapters in names]
    meta = {"vllm": "0.33.0", "format": "bf16", "model": "micro", "device": "NVIDIA H200"}
    meta |= {"commit": "abcdef12", "date": "2026-11-29"}
    for topic, cases in (("e2e-answers-parallel-2", answers), ("parallel-data-2", servers)):
        path = tmp_path / f"benchmarks/results/h200-{topic}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"meta": meta, "cases": cases}))
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    *_, sharded, data = rows_of("parallel_modes")
    cells = ["2", "0.040 to 0.050 / 1.600 to 2.000", "nothing / 1.900 to 1.900", "0 of 9 / 7 of 9"]
    assert data.split(" | ")[1:] == [*cells, "- / - / -", "2,000 / - / 2,000 |"]
    assert sharded.count("untried") == 5


def test_a_server_compared_with_itself_alone_has_a_row_of_answers(tmp_path, monkeypatch):
    row = {"topic": "answers", "compared": "moelora, v2: mixed, each alone", "prompt_max": 0.0}
    row |= {"requests": 6, "same_tokens": 6}
    path = tmp_path / "benchmarks/results/h200-e2e-answers-sglang-alone.json"
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    for differs, said in ((0.0, "yes"), (0.1, "no")):
        meta = {"sglang": "0.5.23", "device": "NVIDIA H200", "date": "2026-11-29"}
        cases = [row, row | {"prompt_max": differs}]
        path.write_text(json.dumps({"meta": meta, "cases": cases}))
        assert (
            rows_of("output_differences")[-1] == f"| SGLang 0.5.23, bf16, its defaults | {said} |"
        )
