"""Which libraries read which dialects of adapters correctly: the table of docs/adapters.md.

    python -m benchmarks.dialect_table --out docs/adapters.md

Each dialect is written for every small model (`tests/support`) and read by
`load_adapters`, and by PEFT with `moelora.integrations.peft.attach`; a result is right if its
logits equal those of merged weights. The columns of vLLM and SGLang follow from their sources.
"""

import argparse
import copy
import pathlib
import re
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from dialects import DIALECTS, merge
from small_models import MODELS, make, tokens

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

BEGIN, END = "<!-- dialects -->", "<!-- end of dialects -->"
RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
LARGEST = 1e-4  # relative error of right logits

# Read in vLLM 0.33.0 and SGLang 0.5.23: (vLLM, SGLang).
STACKS = "where it keeps experts in stacks (gpt-oss, Qwen3.5, ...)"
SKIPPED = "experts skipped with a warning"
READ = {
    "peft": (STACKS, SKIPPED),
    "peft-0.18": ("no", SKIPPED),
    "unsloth-rank-major": (STACKS, SKIPPED),
    "unsloth-grouped": ("wrong; moelora's plugin says so in the log", SKIPPED),
    "unsloth-unmarked": ("wrong; moelora's plugin says so in the log", SKIPPED),
    "megatron-bridge": ("no; moelora's plugin says so in the log", SKIPPED),
    "per-expert": ("where it does not keep experts in stacks", "yes"),
    "mixtral": ("Mixtral, MiniMax", "yes"),
    "lists": ("refused", "?"),
    "granite": ("refused", SKIPPED),
    "stacks": ("?", "yes"),
    "tinker": ("after Tinker's conversion", "yes"),
    "in-training": ("refused; without the adapter's name left out without a word", "?"),
    "multimodal": ("yes", "?"),
    "torch-file": ("yes", "yes"),
    "shards": ("refused", "yes"),
}


@torch.no_grad()
def by_transformers(model, folder, layout, ids):
    model = copy.deepcopy(model)
    moelora_hf.load_adapters(model, {"a": folder}, layout=layout)
    return model(ids, adapter_names=["a"] * len(ids)).logits


@torch.no_grad()
def by_peft(model, folder, layout, ids):
    model = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    moelora_peft.attach(model)
    return model(ids).logits


ENGINES = {"`load_adapters`": by_transformers, "PEFT and `attach`": by_peft}


def outcome(read, model, folder, layout, ids, wanted):
    """(what comes out, the words of a refusal)."""
    try:
        got = read(model, folder, layout, ids)
    except Exception as error:
        return REFUSED, str(error).splitlines()[0] if str(error) else type(error).__name__
    error = (got - wanted).norm() / wanted.norm()
    return (RIGHT, "") if error <= LARGEST else (WRONG, f"relative error {error:.1e}")


def rows(dialects, models):
    """(dialect, {engine: {outcome: number of models}}) of each dialect."""
    made = {name: make(name) for name in models}
    ids = tokens()
    for name in dialects:
        dialect = DIALECTS[name]
        counts = {engine: {} for engine in ENGINES}
        for model_type, model in made.items():
            drawn = dialect.draw(model)
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                path = dialect.write(pathlib.Path(folder) / "a", drawn)
                wanted = merge(model, drawn)(ids).logits
                for engine, read in ENGINES.items():
                    what, why = outcome(read, model, path, dialect.layout, ids, wanted)
                    counts[engine][what] = counts[engine].get(what, 0) + 1
                    print(name, model_type, engine, what, why, file=sys.stderr, flush=True)
        yield name, counts


def cell(counts):
    """Summarize the results of one dialect over all models."""
    if set(counts) == {RIGHT}:
        return "yes"
    if RIGHT not in counts and len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counts[k]} {k}" for k in (RIGHT, REFUSED, WRONG) if k in counts)


def table(found, models):
    lines = [
        f"Of {len(models)} kinds of models each ({', '.join(f'`{m}`' for m in models)}), in",
        f"float32, against merged weights; PEFT {peft.__version__}, transformers "
        f"{transformers.__version__}. vLLM 0.33 and SGLang 0.5.23 as",
        "their sources say; ? where these do not settle it. SGLang reads neither `use_rslora` nor",
        "`rank_pattern` and `alpha_pattern`.",
        "",
        "| adapters | `load_adapters` | PEFT and `attach` | vLLM | SGLang |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, counts in found:
        cells = [DIALECTS[name].what, *(cell(counts[engine]) for engine in ENGINES), *READ[name]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([BEGIN, *lines, END])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, help="a Markdown file; absent: standard output")
    p.add_argument("--dialects", nargs="*", default=list(DIALECTS))
    p.add_argument("--models", nargs="*", default=list(MODELS))
    args = p.parse_args(argv)
    warnings.simplefilter("ignore")
    text = table(list(rows(args.dialects, args.models)), args.models)
    if args.out is None:
        print(text)
        return
    page = args.out.read_text(encoding="utf-8")
    whole = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    if not whole.search(page):
        p.error(f"{args.out} has no {BEGIN}")
    args.out.write_text(whole.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
