"""`python -m moelora info`: what is installed, what can run here, and whether it runs right."""

import argparse
import os
import platform

import torch
from rich.table import Table
from rich.text import Text

from moelora import _C, selftest
from moelora.bench import console


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("info", help="versions, devices, kernel variants, a self-test")
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


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def facts() -> dict[str, str]:
    """What the table says, by row."""
    if not _C.WITH_CUDA:
        cuda = "not compiled in"
    else:
        cuda = "usable" if _C.has_cuda() else "compiled in, no usable GPU here"
    return {
        "moelora": _C.version(),
        "extension": _C.__file__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "devices": "\n".join(devices()),
        "CPU features": _C.cpu_features(),
        "CUDA kernels": cuda,
        "environment": "\n".join(
            f"{name}={value}" for name, value in os.environ.items() if name.startswith("MOELORA_")
        )
        or "no MOELORA_* variable is set",
    }


def run(args: argparse.Namespace) -> int:
    table = Table(show_header=False, title="moelora")
    for name, value in facts().items():
        table.add_row(name, Text(value, overflow="fold"))
    out = console()
    out.print(table)
    found = {} if args.no_test else dict(selftest.run())
    usable = set(_C.usable())
    variants = Table("variant", "here", title="kernel variants")
    for name in _C.variants():
        variants.add_row(name, "no" if name not in usable else _verdict(name, found))
    for name in found.keys() - usable:
        variants.add_row(name, _verdict(name, found))
    out.print(variants)
    wrong = sum(map(bool, found.values()))
    if found:
        out.print(f"self-test: {len(found)} checks, {wrong} wrong", highlight=False)
    return 1 if wrong else 0


def _verdict(name: str, found: dict[str, str]) -> Text:
    if name not in found:
        return Text("usable")
    return Text(found[name], style="red") if found[name] else Text("right")
