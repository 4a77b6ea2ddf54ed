"""`moelora doctor`: what the plugin would do in the engines that are installed here, and why.

Prints without rich, which engines' containers may lack.
"""

from __future__ import annotations

import argparse
import sys

import torch

from moelora import _C
from moelora.integrations import reason_against_build, reason_against_device, shown
from moelora.operators.terminal import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        metavar="FOLDER",
        help="an adapter: does an engine use every tensor of it, and which layers does it change? "
        "(default: report the plugins)",
    )
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="needs --lora: config.json of the adapter's model, or its folder (default: the base "
        "model that the adapter names, if that is a folder here)",
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "sglang", "transformers"),
        help="needs --lora: what will serve it (default: the servers that are installed, else all)",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="needs --lora: a running vLLM with the endpoint plugin moelora_digests: does it hold "
        "what the folder has? URL#NAME names the adapter (default: by the folder)",
    )
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
    """Exit status 0: the plugins are on, and kernels run; 1: not; 2: there is no engine. With
    --lora that of `doctor_lora.run`."""
    if args.lora is not None:
        from moelora.commands import doctor_lora

        return doctor_lora.run(args)
    if more := [name for name in ("model", "engine", "server") if getattr(args, name) is not None]:
        print(f"moelora doctor: --{more[0]} needs --lora, an adapter's folder", file=sys.stderr)
        return 2
    from moelora.integrations.sglang.report import REPORT as SGLANG
    from moelora.integrations.vllm import race
    from moelora.integrations.vllm.report import REPORT as VLLM

    found = {report: version for report in (VLLM, SGLANG) if (version := report.version())}
    if not found:
        print(
            "moelora doctor: neither vLLM nor SGLang is installed for this Python: "
            f"{sys.executable} -m pip install vllm (or sglang) adds one; where an engine has an "
            "environment of its own, install moelora into that and run moelora doctor there",
            file=sys.stderr,
        )
        return 2
    engines = ", ".join(f"{report.engine} {version}" for report, version in found.items())
    print(f"moelora {_C.version()}, torch {torch.__version__}, {engines}")
    ran, correct = kernels()
    print(f"kernels: {printable(ran)}")
    every = [correct]
    for report in found:
        try:
            said, on = report.lines()
        except (Exception, SystemExit) as error:  # of an import of the engine
            said, on = [f"off: {shown(error)}"], False
        print("plugin: " + "\n".join(printable(line) for line in said))
        every.append(on)
    if VLLM in found and (times := race.report()):
        print("races: on cards where moelora was not measured")
        print("\n".join(printable(line) for line in times))
    return 0 if all(every) else 1
