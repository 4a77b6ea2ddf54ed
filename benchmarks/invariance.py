"""Does a row's result depend on its batch? Differing bits of random compositions.

    python -m benchmarks.invariance --device cpu --compositions 200
    python -m benchmarks.invariance --only "layer bf16" --compositions 500

A pool has some hundred tokens: input, experts, weights, adapter, of ranks from 1 to 128 or none. A
composition is a batch of 1 to 8192 of them, in any order, some of them several times. Every
operator runs it; each row has to have the bits that its token has when all tokens of the pool are
one batch. Rows of the file, of which `differing` elements do not:

    path     own: the kernels of this device; cc80: those of every GPU since Ampere
    forced   a kernel variant that plans were told to use where they can; "": none. Only the meta
             counts those without a differing bit

The exit status is 1 if a bit differs, or nothing was compared.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from cases import PER_TOKEN, Problem, Spec
from delta_cases import DELTAS, TILES, delta_kwargs
from quantized_cases import ALL_FORMATS, NATIVE, build, forms_of
from torch import Tensor

import moelora
from benchmarks.options import parser
from moelora import _C
from moelora.bench import results
from moelora.operators.call import factor_list

MOST = {"cuda": 8192, "cpu": 96}  # tokens of a composition
POOL = {"cuda": 640, "cpu": 48}
EDGES = (1, 2, 3, 4, 5, 8, 16, 17, 64, 128, 256, 512, 1024, 4096)
EVERY = Spec(top_k=3, experts=8, hidden=512, inter=256, mix="half_base", bias=True)
SHAPES = {
    "layer": replace(EVERY, ranks=(1, 8, 33, 128, 16, 64)),
    "narrow": replace(EVERY, top_k=8, experts=32, hidden=1024, inter=384, ranks=(16, 8)),
    "few experts": replace(EVERY, top_k=1, experts=2, hidden=576, inter=320, ranks=(40, 64)),
    "deep": replace(EVERY, top_k=2, experts=4, hidden=4160, inter=136, ranks=(16, 128)),
    "wide": replace(EVERY, top_k=2, experts=4, hidden=136, inter=4224, ranks=(24, 32)),
    "one slice": replace(EVERY, slices=1, activation="gelu", ranks=(64, 5)),
    "unaligned": replace(EVERY, hidden=100, inter=36, ranks=(5, 16)),
    "qwen3": replace(EVERY, top_k=8, experts=16, hidden=2048, inter=768, ranks=(16, 64)),
    "mixtral": replace(EVERY, top_k=2, experts=2, hidden=4096, inter=3584, ranks=(16, 64)),
}
QUANTIZED = replace(EVERY, experts=6, hidden=320, inter=192, ranks=(16, 64, 3))
VLLM = replace(EVERY, experts=12, hidden=1160, inter=192, ranks=(32, 32, 32), bias=False)
VLLM = replace(VLLM, pass_ranks=False, scalings=False)
SGLANG = replace(EVERY, slices=1, hidden=264, inter=136, ranks=(64, 17, 3), bias=False)

Operator = Callable[[Problem, Tensor], Tensor]  # of a composition: its problem, the index


# ---- operators: a row of the result for each token ----


def layer(p: Problem, _: Tensor, **weights) -> Tensor:
    return moelora.fused_experts_lora(**p.kwargs() | weights)


def gemm(which: str, p: Problem, _: Tensor, **weights) -> Tensor:
    return moelora.fused_moe_lora_gemm(**p.gemm_kwargs(which, which == "w2") | weights)


def delta(which: str, p: Problem, _: Tensor) -> Tensor:
    return DELTAS[which](**delta_kwargs(p, which, mul_routed_weight=which == "w2"))


def vllm(base: Tensor, block: int, p: Problem, index: Tensor) -> Tensor:
    """Its `fused_moe_lora` onto `base`, by lists of blocks or, of block 0, without."""
    a, b = factor_list(p.w13_lora_a), factor_list(p.w13_lora_b)
    out, slots, experts = base[index], len(p.spec.ranks), p.w13.size(0)
    who, active = (None, p.topk_ids.reshape(-1), None), None
    if block:
        active = torch.arange(slots, dtype=torch.int32, device=out.device)
        rows = p.topk_ids.numel()
        longest = rows + min(rows, experts) * (block - 1)
        blocks = -(-longest // block)
        who = (  # rows, experts, and how many rows are in use
            active.new_full((slots, longest), rows),
            active.new_full((slots, blocks), -1),
            active.new_zeros(slots),
        )
        moelora.moe_lora_align_block_size(
            *(p.topk_ids, p.token_lora_mapping, experts, block, slots, longest, blocks, *who),
            lora_ids=active,
        )
    tiles = (block or 16, *TILES.values())
    moelora.fused_moe_lora(
        *(out, p.hidden_states, a, b, p.topk_weights, *who, p.token_lora_mapping, a[0].size(2)),
        *(p.topk_ids.size(1), active, slots if block else None, None, *tiles, *tiles),
        num_experts=experts,
    )
    return out


def sglang(base: Tensor, p: Problem, index: Tensor) -> Tensor:
    info = moelora.MoELoRABatchInfo(p.token_lora_mapping, p.lora_ranks, p.lora_scalings, None)
    both = (p.w13_lora_a, p.w13_lora_b, p.w2_lora_a, p.w2_lora_b)
    who = (p.hidden_states, p.topk_ids, p.topk_weights, info)
    return moelora.run_moe_lora(*who, *both, base[index])


# ---- pools ----


@dataclass
class Pool:
    """Tokens from which batches are composed, and the operators to run on them."""

    format: str
    problem: Problem
    operators: dict[str, Operator]
    rng: random.Random = field(default_factory=partial(random.Random, 0))

    @property
    def size(self) -> int:
        return len(self.problem.token_lora_mapping)

    def compose(self, index: Tensor) -> Problem:
        """The problem of these tokens, in this order."""
        p = self.problem
        rows = p.rows.unflatten(0, (-1, p.spec.top_k))[index].flatten(0, 1)
        return replace(p, **{name: getattr(p, name)[index] for name in PER_TOKEN}, rows=rows)

    def reference(self) -> dict[str, Tensor]:
        """Rows of all tokens in one batch."""
        everyone = torch.arange(self.size, device=self.problem.w13.device)
        return {name: run(self.problem, everyone) for name, run in self.operators.items()}

    def count(self, want: dict[str, Tensor], compositions: int, until=math.inf) -> dict[str, dict]:
        """{operator: how many compositions and elements were compared, and how many differ}; the
        first composition is one token alone, none begins after `until` of time.monotonic()."""
        device = self.problem.w13.device
        counts = {name: {"compositions": 0, "elements": 0, "differing": 0} for name in want}
        for number in range(compositions):
            if time.monotonic() > until:
                break
            drawn = draw(self.rng, self.size, MOST[device.type]) if number else [0]
            index = torch.tensor(drawn, device=device)
            p = self.compose(index)
            for name, run in self.operators.items():
                y, count = run(p, index), counts[name]
                count["compositions"] += 1
                count["elements"] += y.numel()
                count["differing"] += (bits(y) != bits(want[name][index])).sum()
        return {name: {n: int(number) for n, number in c.items()} for name, c in counts.items()}


def base_product(p: Problem, *columns: int) -> Tensor:
    make = torch.Generator(p.w13.device).manual_seed(5)
    shape = (p.topk_ids.size(0), *columns)
    return torch.randn(shape, generator=make, device=p.w13.device).to(p.w13.dtype)


def pools(device: str) -> Iterator[tuple[str, Callable[[], Pool]]]:
    """Every pool as (name, how to make it)."""

    def native(spec: Spec) -> Problem:
        return replace(spec, tokens=POOL[device]).build().to(device)

    def own(spec: Spec) -> Pool:
        operators = {"layer": layer}
        for name, operator in (("gemm", gemm), ("delta", delta)):
            operators |= {f"{name} {which}": partial(operator, which) for which in ("w13", "w2")}
        return Pool(NATIVE, native(spec), operators)

    def quantized(form: str, spec: Spec) -> Pool:
        made = build(replace(spec, tokens=POOL[device]), ALL_FORMATS[form], spec.dtype).to(device)
        whole, down = partial(layer, w13=made.w13, w2=made.w2), partial(gemm, "w2", w=made.w2)
        return Pool(form, made.dense, {"layer": whole, "gemm w2": down})

    def of_vllm(spec: Spec) -> Pool:
        p = native(spec)
        base = base_product(p, p.spec.top_k, p.w13.size(1))
        blocks = {"naive": 0, "lists of 16": 16, "lists of 64": 64}
        operators = {f"fused_moe_lora, {how}": partial(vllm, base, n) for how, n in blocks.items()}
        return Pool(NATIVE, p, operators)

    def of_sglang(spec: Spec) -> Pool:
        p = native(spec)
        return Pool(NATIVE, p, {"run_moe_lora": partial(sglang, base_product(p, p.spec.hidden))})

    words = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    for word, dtype in words.items():
        if device == "cuda" and dtype == torch.float32:
            continue
        for shape, spec in SHAPES.items():
            yield f"{shape} {word}", partial(own, replace(spec, dtype=dtype))
        yield f"vllm {word}", partial(of_vllm, replace(VLLM, dtype=dtype))
        yield f"sglang {word}", partial(of_sglang, replace(SGLANG, dtype=dtype))
        for format in ALL_FORMATS if dtype != torch.float32 else ():
            spec = replace(QUANTIZED, dtype=dtype)
            yield f"{format} {word}", partial(quantized, format, spec)
        if device == "cuda":  # tiles in runs
            wide = replace(QUANTIZED, hidden=2304, dtype=dtype)
            yield f"fp8 wide {word}", partial(quantized, "fp8_block_w8a8", wide)


# ---- compositions ----


def draw(rng: random.Random, size: int, most: int) -> list[int]:
    """Tokens of a pool of `size`: all different, or any, or one again and again."""
    tokens = round(math.exp(rng.random() * math.log(most)))
    if rng.random() < 0.3:
        tokens = min(rng.choice(EDGES), most)
    how = rng.random()
    if how < 0.4 and tokens <= size:
        return rng.sample(range(size), tokens)
    few = range(size) if how < 0.8 else rng.sample(range(size), rng.choice((1, 2, 5, 20)))
    return rng.choices(few, k=tokens)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()]).flatten(1)


def forced(pool: Pool, device: str) -> list[str]:
    """Variants that plans of this pool may use: of its dtype and format, or of ids. A CPU has one
    set of instructions, and with it one row of each dtype."""
    word = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(pool.problem.spec.dtype)
    return [
        name
        for name in _C.usable()
        if device == "cuda" and "_sm" in name and name.split("_")[1] in (word, "i32")
        if {NATIVE, pool.format} & set(forms_of(name))
    ]


def prove(pool: Pool, device: str, compositions: int, again: int, until: float) -> Iterator[dict]:
    """Rows of the file for one pool, without its name."""
    for path in ("own", "cc80") if device == "cuda" else ("own",):
        try:
            if path == "cc80":
                _C.limit_capability(80)
                compositions = compositions // 4 + 1
            want = pool.reference()
            for variant in ("", *forced(pool, device)):
                _C.force_variant(variant or None)
                counts = pool.count(want, again if variant else compositions, until)
                for operator, count in counts.items():
                    head = {"operator": operator, "format": pool.format}
                    if count["compositions"]:
                        yield head | {"path": path, "forced": variant} | count
        finally:
            _C.force_variant(None)
            if path == "cc80":
                _C.limit_capability(0)


# ---- command ----


def main(argv=None) -> int:
    p = parser(
        __doc__,
        device=("cuda" if _C.has_cuda() else "cpu", "of the kernels"),
        compositions=(10000, "over all pools"),
        again=(10, "of each pool and forced variant"),
        only=("", "pools whose names begin so, commas between"),
        deadline_s=(math.inf, "compose no more then"),
    )
    args = p.parse_args(argv)
    begin = tuple(args.only.split(","))
    wanted = [(name, make) for name, make in pools(args.device) if name.startswith(begin)]
    if not wanted:
        p.error(f"--only is {args.only!r}: no pool's name begins so")
    started, rows, compositions = time.monotonic(), [], 0
    each = -(-args.compositions // len(wanted))
    for i, (name, make) in enumerate(wanted):
        now = time.monotonic()
        until = now + max(0.0, started + args.deadline_s - now) / (len(wanted) - i)
        found = prove(make(), args.device, each, args.again, until)
        made = [{"pool": name} | row for row in found]
        rows += made
        compositions += max((row["compositions"] for row in made), default=0)
        print(f"{name}: {sum(row['differing'] for row in made)} differing", flush=True)
        for row in made:
            if row["differing"]:
                print(f"    {row}")
    summary = {"compositions": compositions, "calls": sum(row["compositions"] for row in rows)}
    summary |= {name: sum(row[name] for row in rows) for name in ("elements", "differing")}
    rows = [row for row in rows if not row["forced"] or row["differing"]]
    print(summary)
    if args.out:
        results.write(args.out, rows, **summary, seconds=round(time.monotonic() - started))
    return 0 if compositions and not summary["differing"] else 1


if __name__ == "__main__":
    sys.exit(main())
