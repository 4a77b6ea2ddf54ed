"""Which mixture-of-experts architectures of transformers reach moelora, and why others do not.

    python -m benchmarks.architectures --out docs/architectures.md

Every architecture whose code has a class of experts is made with its own default sizes, on the meta
device, and given to `moelora.integrations.transformers.enable`. Only the experts get memory, a few
numbers each, because their activation is found out by calling it.
"""

import argparse
import contextlib
import importlib
import io
import pathlib
import re
import sys

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.empty import empty_model, factory
from moelora.integrations.transformers.projection import up_name

EXPERTS = re.compile(r"^class \w*(Experts?|MoE|MoeBlock)\b", re.M)


def architectures():
    """Model types whose modeling code has experts."""
    for model_type, config in sorted(CONFIG_MAPPING.items()):
        package = config.__module__.rpartition(".")[0]
        name = package.rpartition(".")[2]
        try:
            module = importlib.import_module(f"{package}.modeling_{name}")
        except ImportError:
            continue
        code = pathlib.Path(module.__file__).read_text()
        if EXPERTS.search(code) and factory(config()) is not None:
            yield model_type


def make(model_type):
    """A model without memory."""
    return empty_model(transformers.AutoConfig.for_model(model_type))


def shrink(model):
    """Gives experts behind the interface weights of a few numbers."""
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            for name, outer in ((up_name(module), 2), ("down_proj", 1)):
                shape = (1, 4, 4 * outer) if module.is_transposed else (1, 4 * outer, 4)
                setattr(module, name, nn.Parameter(torch.zeros(shape)))


def ask(model_type):
    """None if every layer reaches moelora, else the reason; and whether that was asked at all."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model = make(model_type)
    except Exception as error:
        return False, f"not made from its default configuration: {type(error).__name__}"
    shrink(model)
    try:
        moelora_hf.enable(model)
    except NotImplementedError as error:
        return True, str(error)
    return True, None


def table(rows):
    reached = sum(asked and reason is None for _, asked, reason in rows)
    asked = sum(asked for _, asked, _ in rows)
    text = f"""\
Of {asked} mixture-of-experts architectures of transformers {transformers.__version__}, each made
from its default configuration, {reached} reach moelora in every layer. For the others `enable` of
`moelora.integrations.transformers` raises, with the reason. Where the default has no experts there
are none; a question mark stands where the default makes no model."""
    lines = [
        "# Architectures",
        "",
        *text.split("\n"),
        "",
        "Made by `python -m benchmarks.architectures --out docs/architectures.md`.",
        "",
        "| `model_type` | reaches moelora | |",
        "| --- | --- | --- |",
    ]
    for model_type, was_asked, reason in rows:
        answer = "yes" if reason is None else ("no" if was_asked else "?")
        lines.append(f"| `{model_type}` | {answer} | {reason or ''} |")
    return "\n".join([*lines, ""])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, help="a Markdown file; absent: standard output")
    p.add_argument("--only", nargs="*", help="model types")
    args = p.parse_args(argv)
    rows = []
    for model_type in args.only or architectures():
        rows.append((model_type, *ask(model_type)))
        print(*rows[-1], file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text(table(rows))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
