"""`moelora doctor`: what the plugin would do in the engine that is installed here, and why.

Prints without rich, which engines' containers may lack.
"""

from __future__ import annotations

import argparse
import sys

import torch

from moelora import _C
from moelora.integrations import reason_against_build, reason_against_device
from moelora.terminal import printable


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="whether an installed vLLM runs moelora, and where")
    parser.set_defaults(run=run)


def kernels() -> tuple[str, bool]:
    """Whether kernels run here: a layer on the first GPU against the CPU."""
    if reason := reason_against_build():
        return reason, False
    if not torch.cuda.device_count():
        return "there is no GPU", False
    try:
        torch.cuda.init()
        reason = reason_against_device()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    return reason or f"correct on {torch.cuda.get_device_name()}", reason is None


def run(args: argparse.Namespace) -> int:
    """Exit status 0: the plugin is on, and kernels run; 1: not; 2: there is no vLLM."""
    from moelora.integrations.vllm import report

    found = report.version()
    if found is None:
        print("moelora doctor: vLLM is not installed in this environment", file=sys.stderr)
        return 2
    print(f"moelora {_C.version()}, torch {torch.__version__}, vLLM {found}")
    try:
        said, on = report.lines()
    except Exception as error:  # of an import of vLLM
        said, on = [f"off: {type(error).__name__}: {str(error):.300}"], False
    ran, correct = kernels()
    print(f"kernels: {printable(ran)}")
    print("plugin: " + "\n".join(printable(line) for line in said))
    return 0 if on and correct else 1
