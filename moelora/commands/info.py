"""`moelora info`: what is installed, what can run here, and whether it is correct."""

import argparse
import os
import platform
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from moelora import _C
from moelora.bench import console
from moelora.commands import selftest
from moelora.operators.tuned import cpu_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-test", action="store_true", help="only say what is there")
    parser.set_defaults(run=run)


def devices() -> list[str]:
    """One line for each device that torch sees."""
    lines = [f"cpu: {cpu_name()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, "
            f"{gpu.multi_processor_count} SMs, {gpu.total_memory / 2**30:.0f} GiB"
        )
    return lines


def facts() -> dict[str, str]:
    """Rows of the table."""
    if not _C.WITH_CUDA:
        cuda = "not compiled in"
    else:
        cuda = "usable" if _C.has_cuda() else "compiled in, no usable GPU here"
    return {
        "moelora": _C.version(),
        "extension": _C.__file__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "devices": "\n".join(devices()),
        "CPU features": _C.cpu_features() or "scalar",
        "CUDA kernels": cuda,
        "environment": "\n".join(
            f"{name}={value}" for name, value in os.environ.items() if name.startswith("MOELORA_")
        )
        or "no MOELORA_* variable is set",
    }


def run(args: argparse.Namespace) -> int:
    table = Table(show_header=False, title="moelora")
    known = facts()
    for name, value in known.items():
        table.add_row(name, Text(value, overflow="fold"))
    out = console()
    out.print(table)
    found = {} if args.no_test else tested(out)
    usable = set(_C.usable())
    variants = Table("variant", "here", title="kernel variants")
    for name in _C.variants():
        variants.add_row(name, "no" if name not in usable else _verdict(name, found))
    for name in found.keys() - usable:
        variants.add_row(name, _verdict(name, found))
    out.print(variants)
    incorrect = [f"{name}: {why}" for name, why in found.items() if why]
    said = "not run"
    if found:
        ran = [name for name, why in found.items() if why is not None]
        said = f"{len(ran)} checks, {len(incorrect)} incorrect"
        if len(ran) < len(found):
            said += f"; no layer of them has the other {len(found) - len(ran)} kernels"
        out.print(f"self-test: {said}", highlight=False)
    out.print("\nTo paste into a bug report:\n", highlight=False)
    report = block({**known, "self-test": "\n".join([said, *incorrect])})
    out.print(Text(report, overflow="fold"), highlight=False, soft_wrap=True)
    return 1 if incorrect else 0


def tested(out: Console) -> dict[str, str | None]:
    """Result of the self-test, with a progress bar."""
    found: dict[str, str | None] = {}
    with Progress(console=out, transient=True) as progress:
        bar = progress.add_task("self-test", total=selftest.count())
        for what, problem in selftest.run():
            found[what] = problem
            progress.advance(bar)
    return found


def block(known: dict[str, str]) -> str:
    """Markdown for an issue, without the path of the extension, which would reveal a user name."""
    lines: Sequence[str] = [
        f"{name}: {' | '.join(value.splitlines())}"
        for name, value in known.items()
        if name != "extension"
    ]
    return "\n".join(["```text", *lines, "```"])


def _verdict(name: str, found: dict[str, str | None]) -> Text:
    if (why := found.get(name)) is None:
        return Text("usable, not run")
    return Text(why, style="red") if why else Text("correct")
