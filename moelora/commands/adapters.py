"""`moelora adapters`: describe an adapter, report whether it loads, or what prevents it, and write
it with one pair for each expert."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moelora.adapters import load, peek
from moelora.adapters.columns import Layout
from moelora.adapters.config import CONFIG_FILE
from moelora.adapters.describe import Group, describe
from moelora.adapters.engine_names import STACKED, names_of
from moelora.adapters.files import file_in, read_json
from moelora.adapters.folders import replacing
from moelora.adapters.write import FILES, per_expert_tensors, save
from moelora.bench import console
from moelora.operators.terminal import printable
from moelora.training.tenants.files import STATE_FILES

STACKS = (
    "vLLM reads stacks of experts only for models whose experts it keeps in stacks (gpt-oss, "
    "Qwen3.5); --per-expert OUT writes one pair for each expert, for others and for SGLang"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="with adapter_config.json and the weights beside it")
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        help="config.json of a model, or its folder: is everything for layers of it? "
        "(default: say what the folder tells)",
    )
    parser.add_argument(
        "--layout",
        choices=get_args(Layout),
        help="how columns of lora_B lie (default: as the adapter says)",
    )
    parser.add_argument(
        "--per-expert",
        metavar="OUT",
        help="needs --model: also write the adapter in this folder with one pair for each expert, "
        "as SGLang reads it, and vLLM for models whose experts it does not keep in stacks, such as "
        "Qwen3-MoE (default: write nothing)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="--per-expert may replace an adapter in a folder that is not empty; other files of it "
        "stay (default: refuse)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 0: it loads, and is written; 1: it does not; 2: there is no adapter, no such
    model, or the arguments are wrong."""
    try:
        if args.per_expert is not None:
            _check_out(args)
        elif args.force:
            raise ValueError("--force needs --per-expert, the folder to write to")
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
        if args.per_expert is None and any("stack" in group.form for group in found.groups):
            _say(out, STACKS)
        if args.per_expert is not None and not problems:
            try:
                _say(out, _write_per_expert(args))
            except (OSError, ValueError) as error:
                problems.append(f"--per-expert: {error}")
    for problem in problems:
        _say(out, f"problem: {problem}")
    if not problems and args.model is None:
        _say(out, "nothing is wrong by itself; --model CONFIG compares it with a model's layers")
    return 1 if problems else 0


def _check_out(args: argparse.Namespace) -> None:
    """Refuse `--per-expert` before anything is read."""
    if args.model is None:
        raise ValueError("--per-expert needs --model, the config.json of the adapter's model")
    if not args.per_expert:
        raise ValueError("--per-expert is empty, wanted a folder to write to")
    out = Path(args.per_expert)
    if Path(args.folder).resolve().is_relative_to(out.resolve()):
        raise ValueError(
            f"--per-expert {out} is or contains the adapter's own folder, wanted another one"
        )
    if not args.force and os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(
            f"--per-expert {out} is there and not an empty folder, wanted a new one; --force "
            "replaces the adapter in it"
        )


def _say(out: Console, text: str) -> None:
    out.print(_text(text), highlight=False, soft_wrap=True)


def _text(text: object) -> Text:
    """Text from a file, without terminal escapes and rich markup."""
    return Text(printable(text), overflow="fold")


def _factors(groups: list[Group]) -> Table:
    table = Table("factors of", "number", "what", "A", "B", "rank")
    for group in groups:
        shapes = [" ".join(str(list(s)) for s in sorted(side)) for side in (group.a, group.b)]
        among = " or " if "target_parameters" in group.form else ", "
        ranks = among.join(map(str, sorted(group.ranks)))
        table.add_row(_text(group.name), str(len(group.modules)), group.form, *shapes, ranks)
    return table


def _write_per_expert(args: argparse.Namespace) -> str:
    """Write the adapter, which `_fits` has accepted; what was written, in a line."""
    from moelora.integrations.transformers.empty import empty_layers

    empty, layers, found = empty_layers(args.model)
    linears = {name: linear.layer for name, linear in found.items()}
    adapter = load(args.folder, None, [*layers.values()], [*linears.values()], layout=args.layout)
    base = read_json(file_in(Path(args.folder), CONFIG_FILE)).get("base_model_name_or_path")
    kind = empty.config.model_type
    options: dict[str, Any] = {"base_model": base if isinstance(base, str) else None}
    options["names"] = names = names_of(kind)
    with replacing(args.per_expert, (*FILES, *STATE_FILES)) as new:
        save(new, *per_expert_tensors(adapter, layers, linears, **options))
    said = f"written with one pair for each expert: {args.per_expert}"
    if kind in STACKED:
        said += f"; SGLang reads it, and vLLM the experts of {kind} only as stacks, as they were"
    if names.second is not None:
        one, other = (part.strip(".") for part in names.second)
        said += f"; vLLM calls them {one} or {other}, by release: each pair is there as both"
    return said


def _fits(folder: str, model: str, layout: Layout | None) -> tuple[list[str], list[str]]:
    """How a model would serve an adapter, in lines of text, and what prevents it."""
    from moelora.integrations.transformers.empty import empty_layers
    from moelora.integrations.transformers.enable import own_experts

    empty, experts, linears = empty_layers(model)
    has = f"{type(empty).__name__} has {len(experts)} layers of experts, "
    has += f"{len(linears)} linear layers or embeddings"
    if aside := own_experts(empty, set(experts)):
        has += f"; {', '.join(aside)} are code of its own, which moelora does not run"
    specs = [*experts.values()], [linear.layer for linear in linears.values()]
    try:
        info = peek(folder, *specs, layout=layout)
    except (ValueError, OSError) as error:
        return [has], [str(error)]
    if refused := [n for n in info.linear_ranks if linears[n].refusal]:
        return [has], [f"factors of {n}, {linears[n].refusal}" for n in refused[:5]]
    shares = " with one A for gate and up" if info.max_rank and info.fused else ""
    parts = [f"experts up to rank {info.max_rank}{shares}"] if info.max_rank else []
    if info.linear_ranks:
        ranks = sorted(set(info.linear_ranks.values()))
        parts.append(f"{len(info.linear_ranks)} other layers of rank {', '.join(map(str, ranks))}")
    return [has, f"load_adapters serves all of the adapter: {'; '.join(parts)}"], []
