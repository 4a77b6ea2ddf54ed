"""The measured tables of README.md and docs/, from benchmarks/results/.

    python -m benchmarks.tables NAME...   prints some of them
    python -m benchmarks.tables --write   updates the pages

A page contains a table between `<!-- NAME -->` and `<!-- /NAME -->`. At `<!-- site: NAME, NAME -->`
only the generated site does (docs/mkdocs_hooks.py), which is built without torch: this module must
not import moelora. A name is a key of TABLES, or a function of these modules, followed by the topic
of its file where it makes tables of several; `from TOPIC` is provenance and command of a file.
"""

import re

from benchmarks import ROOT, training_memory
from benchmarks.tables import engines, files, layers, models, serving, training
from benchmarks.tables.cases import TABLES, table

# That of weight-formats.md is not from benchmarks: tests/quantizers/table.py.
DOCS = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "weight-formats")
PAGES = ["README.md", *(f"docs/{page.name}" for page in DOCS)]
PICTURES = {  # {file: (topic of a file, what `moelora bench plot` takes beside it)}
    "docs/layer.png": ("layer", []),
    "docs/beside.png": ("layer", ["--picture", "beside", "--vllm-version", "0.33"]),
    "docs/rl.png": ("rl", ["--picture", "rl"]),
}
NOT_MEASURED = "*Not measured yet.*"  # a table whose file, or its rows in it, are not there
UNDATED = {"claim", "quantized_layers", "cpu_ranges", "cpu_amx_ranges", "training_alternatives"}
MADE = {"from": files.source, "training-memory": training_memory.table}
MADE |= {"several-gpus": training_memory.parallel_table}
for module in (layers, serving, engines, training, models):
    MADE |= vars(module)


def section(name):
    """A table, and commits and days of the files that it is of, unless it has them."""
    first, *topic = name.split()
    files.used.clear()
    try:
        text = table(*TABLES[name]) if name in TABLES else MADE[first](*topic)
    except files.NotMeasuredError:
        return NOT_MEASURED
    commits = sorted({meta["commit"][:8] for meta in files.used.values()})
    if name in UNDATED or all(commit in text for commit in commits):
        return text
    days = sorted({meta["date"] for meta in files.used.values()})
    return (
        f"{text}\n\nMeasured at {', '.join(commits)}, {' to '.join(sorted({days[0], days[-1]}))}."
    )


def filled(text):
    """A page with all of its tables regenerated."""
    between = re.compile(r"<!-- ([\w -]+) -->.*?<!-- /\1 -->", re.S)
    return between.sub(lambda m: f"<!-- {m[1]} -->\n{section(m[1])}\n<!-- /{m[1]} -->", text)


def for_site(text):
    """A page with the tables that only the site has."""
    found = re.compile(r"<!-- site: (.*?) -->")
    return found.sub(lambda m: "\n\n" + "\n\n".join(map(section, m[1].split(", "))), text)
