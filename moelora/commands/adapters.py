"""`moelora adapters`: describe an adapter and report whether it loads, or what prevents it."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moelora.adapters import peek
from moelora.adapters.columns import Layout
from moelora.adapters.describe import Group, describe
from moelora.bench import console
from moelora.terminal import printable


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("adapters", help="what an adapter is, and whether it will load")
    parser.add_argument("folder", help="with adapter_config.json and the weights beside it")
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="config.json of a model, or its folder: is everything for layers of it? "
        "(default: say what the folder alone tells)",
    )
    parser.add_argument(
        "--layout",
        choices=get_args(Layout),
        help="how columns of lora_B lie (default: as the adapter says)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0: it loads; 1: it does not; 2: there is no adapter, or no such model."""
    try:
        found = describe(args.folder)
    except (OSError, ValueError) as error:
        print(f"moelora adapters: {printable(error)}", file=sys.stderr)
        return 2
    out = console()
    facts = Table(show_header=False, title=_text(args.folder))
    for name, value in found.facts.items():
        lines = [_text(line) for line in value.splitlines()]
        facts.add_row(name, Text("\n", overflow="fold").join(lines))
    out.print(facts)
    out.print(_factors(found.groups))
    problems = [p for p in found.problems if args.layout is None or "pass layout=" not in p]
    if args.model is not None and not problems:
        try:
            answer, problem = _fits(args.folder, args.model, args.layout)
        except (OSError, ValueError, NotImplementedError, ImportError) as error:
            print(
                f"moelora adapters: --model {printable(args.model)}: {printable(error)}",
                file=sys.stderr,
            )
            return 2
        for line in answer:
            _say(out, line)
        problems += problem
    for problem in problems:
        _say(out, f"problem: {problem}")
    if not problems and args.model is None:
        _say(out, "nothing is wrong by itself; --model CONFIG compares it with a model's layers")
    return 1 if problems else 0


def _say(out: Console, text: str) -> None:
    out.print(_text(text), highlight=False, soft_wrap=True)


def _text(text: object) -> Text:
    """Text from a file, without terminal escapes and rich markup."""
    return Text(printable(text), overflow="fold")


def _factors(groups: list[Group]) -> Table:
    table = Table("factors of", "number", "what", "A", "B", "rank")
    for group in groups:
        shapes = [" ".join(str(list(s)) for s in sorted(side)) for side in (group.a, group.b)]
        ranks = ", ".join(map(str, sorted(group.ranks)))
        table.add_row(_text(group.name), str(len(group.modules)), group.form, *shapes, ranks)
    return table


def _fits(folder: str, model: str, layout: Layout | None) -> tuple[list[str], list[str]]:
    """How a model would serve an adapter, in lines of text, and what prevents it."""
    from moelora.integrations.transformers import moe_layers
    from moelora.integrations.transformers.empty import empty_model
    from moelora.integrations.transformers.enable import own_experts
    from moelora.integrations.transformers.linears import linear_layers

    empty = empty_model(model)
    name = type(empty).__name__
    try:
        experts = moe_layers(empty)
    except ValueError:
        experts = {}
    linears = linear_layers(empty, experts)
    has = f"{name} has {len(experts)} layers of experts, {len(linears)} linear layers or embeddings"
    aside = own_experts(empty, set(experts))
    if aside:
        has += f"; {', '.join(aside)} are code of its own, which moelora does not run"
    layers = [layer for _, layer in experts.values()]
    try:
        info = peek(folder, layers, [linear.layer for linear in linears.values()], layout=layout)
    except (ValueError, OSError) as error:
        return [has], [str(error)]
    refused = [n for n in info.linear_ranks if linears[n].refusal]
    if refused:
        return [has], [f"factors of {n}, {linears[n].refusal}" for n in refused[:5]]
    shares = " with one A for gate and up" if info.max_rank and info.fused else ""
    parts = [f"experts up to rank {info.max_rank}{shares}"] if info.max_rank else []
    if info.linear_ranks:
        ranks = sorted(set(info.linear_ranks.values()))
        parts.append(f"{len(info.linear_ranks)} other layers of rank {', '.join(map(str, ranks))}")
    return [has, f"load_adapters serves all of the adapter: {'; '.join(parts)}"], []
