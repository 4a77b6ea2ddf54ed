"""The measured tables of README.md and docs/, from benchmarks/results/.

    python -m benchmarks.tables [NAME...]  prints them, or some of them
    python -m benchmarks.tables --write    updates the pages

Names are the keys of TABLES, MADE and COMPUTED, or `from TOPIC`: provenance and command
of a file. A file is named <card>-<topic>.json; of several cards the newest is taken, and tables
name the card.
A page contains a table between `<!-- name -->` and `<!-- /name -->`. At `<!-- site: name, name -->`
only the generated site does (docs/mkdocs_hooks.py), which is built without torch: this module must
not import moelora.
"""

import re

from benchmarks import training_memory
from benchmarks.tables import engines, layers, models, serving, training
from benchmarks.tables.columns import TABLES
from benchmarks.tables.files import AWAITED, source, used_by
from benchmarks.tables.text import table, wrapped

PAGES = (
    "README.md",
    "docs/README.md",
    "docs/limits.md",
    "docs/measurements.md",
    "docs/serving.md",
    "docs/batch-invariance.md",
    "docs/training.md",
    "docs/several-gpus.md",
    "docs/transformers.md",
    "docs/adapters.md",
    "docs/answers.md",
    "docs/serving-benchmark.md",
    "docs/rl.md",
)
PICTURES = {  # {file: (topic of a file, what `moelora bench plot` takes beside it)}
    "docs/layer.png": ("layer", []),
    "docs/beside.png": ("layer", ["--picture", "beside", "--vllm-version", "0.33"]),
    "docs/arrivals.png": ("churn", ["--picture", "arrivals"]),
    "docs/rl.png": ("rl", ["--picture", "rl"]),
}
# {name: (topic of a file, None: of several, its table)}
MADE = {
    "format_ranges": ("formats", layers.format_ranges),
    "quantized_layers": ("formats", layers.format_ranges),
    "layer_ranges": ("layer", layers.layer_ranges),
    "cpu_format_ranges": ("cpu-formats", layers.cpu_format_ranges),
    "layers_on_others": ("layer", layers.on_other_cards),
    "invariance_found": ("invariance", lambda: wrapped(layers.invariance_found())),
    "serving_rates": (None, serving.serving_rates),
    "serving_adapters": (None, serving.serving_adapters),
    "alternatives": (None, serving.alternatives),
    "decode_ratios": (None, serving.decode_ratios),
    "output_differences": (None, engines.output_differences),
    "reference_distances": (None, engines.reference_distances),
    "parallel_modes": (None, engines.parallel_modes),
    "engine_bits": ("e2e-invariance", engines.engine_bits),
    "training_peers": ("training", training.training_peers),
    "training_peers_64": ("training-64", lambda: training.training_peers("training-64")),
    "training_quantized": ("training", training.training_quantized),
    "training_quantized_nf4": ("training-nf4", lambda: training.training_quantized("training-nf4")),
    "training_on_others": ("training", training.on_other_cards),
    "training_memory_measured": ("training-memory", training.training_memory_measured),
    "parallel_steps": ("training-parallel", training.parallel_steps),
    "parallel_memory": ("training-parallel", lambda: wrapped(training.parallel_memory())),
    "sampler_bits": ("e2e-sampler", lambda: wrapped(training.sampler_bits())),
    "sampler_bits_fp8": (
        "e2e-sampler-fp8",
        lambda: wrapped(training.sampler_bits("e2e-sampler-fp8")),
    ),
}
COMPUTED = {  # without commits and dates
    "training-memory": training_memory.table,
    "several-gpus": training_memory.parallel_table,
    "claim": serving.claim,
    "serving_all": serving.serving_all,
    "models": models.table,
    "cpu_ranges": lambda: wrapped(layers.cpu_ranges()),
    "cpu_amx_ranges": lambda: wrapped(layers.cpu_amx_ranges()),
    "training_alternatives": lambda: wrapped(training.training_alternatives()),
}


def section(name):
    """A table is followed by commits and dates of the files that it is of."""
    if name.startswith("from "):
        return source(name.removeprefix("from "))
    if name in TABLES or name in MADE:
        text, metas = used_by(MADE[name][1] if name in MADE else lambda: table(name))
        return f"{text}{measured_at(metas, text)}"
    return COMPUTED[name]()


def measured_at(metas, text):
    """A sentence of commits and days, unless the text has them, or nothing is measured."""
    commits = sorted({meta["commit"][:8] for meta in metas})
    if text == AWAITED or all(commit in text for commit in commits):
        return ""
    days = sorted({meta["date"] for meta in metas})
    return f"\n\nMeasured at {', '.join(commits)}, {' to '.join(sorted({days[0], days[-1]}))}."


def filled(text):
    """A page with all of its tables regenerated."""
    between = re.compile(r"<!-- ([\w -]+) -->.*?<!-- /\1 -->", re.S)
    return between.sub(lambda m: f"<!-- {m[1]} -->\n{section(m[1])}\n<!-- /{m[1]} -->", text)


def for_site(text):
    """A page with the tables that only the site has."""
    found = re.compile(r"<!-- site: (.*?) -->")
    return found.sub(lambda m: "\n\n" + "\n\n".join(map(section, m[1].split(", "))), text)
