"""Only alignment: ours by expert, by (expert, adapter) in both modes, and vLLM's kernels.

    python -m benchmarks.align --out benchmarks/results/h200-align.json
    python -m benchmarks.align --models qwen3 --tokens 1024,16384 --baselines none

Microseconds of one call, median of CUDA-graph replays of many calls on rotating batches. Block
sizes are those that vLLM's own tables choose for the case (its LoRA alignment has one of its own);
where vLLM's copy is not there, 16 rows up to 8 routed rows per expert and 64 beyond. Before it is
timed, ours is compared with the CPU's result id by id, and vLLM's with the number of padded rows.
"""

import time

import torch
from rich.progress import Progress

import moelora
from benchmarks import options, tables
from benchmarks.baselines import vllm
from moelora.bench import cases, results
from moelora.bench.shapes import MODELS, Model
from moelora.bench.timing import GraphTimer

TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
SETS = 4
# Small enough that GraphTimer puts as many calls into a graph as it ever does.
BYTES_PER_CALL = 1.0


def calls(batch, model, block_size, adapters):
    """{name: call} of our operators on one batch."""
    lora = (batch.topk_ids, batch.mapping, model.experts, block_size, adapters)
    return {
        "ours_base": lambda: moelora.moe_align_block_size(
            batch.topk_ids, block_size, model.experts
        ),
        "ours_uniform": lambda: moelora.moe_lora_align_block_size(*lora),
        "ours": lambda: moelora.moe_lora_align_block_size(*lora, mode="segmented"),
        "ours_sorting": lambda: moelora.moe_sorting(
            batch.topk_ids, batch.topk_weights, model.experts, block_size
        ),
    }


def to_cpu(batch):
    return cases.Batch(*(t.cpu() for t in vars(batch).values()))


def check_ours(batch, model, block_size, adapters):
    here = calls(to_cpu(batch), model, block_size, adapters)
    for name, call in calls(batch, model, block_size, adapters).items():
        for i, (got, expected) in enumerate(zip(call(), here[name](), strict=True)):
            if not torch.equal(got.cpu(), expected):
                raise RuntimeError(f"{name}: output {i} differs from the CPU's")


class Peer:
    """vLLM's alignment for one model and number of tokens."""

    def __init__(self, vk, model, tokens, adapters):
        self.vk, self.adapters = vk, adapters
        self.layer = vllm.shaped_layer(vk, model, tokens)
        self.lora = vllm.lora(vk, vllm.shaped_factors(model, adapters, 16))

    def token_set(self, batch):
        return vllm.token_set(self.vk, batch, self.adapters)

    def base(self, token_set):
        return self.layer.align(token_set)

    def lora_align(self, token_set):
        return self.layer.lora_align(token_set, self.lora, False)

    @property
    def block_size(self):
        return self.layer.config["BLOCK_SIZE_M"]


def measure(timer, name, tokens, args, generator, vk):
    """One case of the result file."""
    model = MODELS[name]
    narrow = Model(model.name, model.experts, model.top_k, 8, 8)
    batches = [
        cases.draw_batch(narrow, tokens, args.adapters, generator, routing=args.routing)
        for _ in range(SETS)
    ]
    peer = Peer(vk, model, tokens, args.adapters) if vk is not None else None
    rows = tokens * model.top_k
    block_size = peer.block_size if peer else 16 if rows <= 8 * model.experts else 64
    check_ours(batches[0], model, block_size, args.adapters)

    ours = [calls(batch, model, block_size, args.adapters) for batch in batches]
    runs = {key: lambda i, key=key: ours[i][key]() for key in ours[0]}
    if peer:
        sets = [peer.token_set(batch) for batch in batches]
        # Without a sort (too few rows for one to pay) there is nothing to compare with.
        if peer.base(sets[0])[0] is not None:
            runs["vllm_base"] = lambda i: peer.base(sets[i])
            theirs, mine = peer.base(sets[0])[2], ours[0]["ours_base"]()[2]
            if theirs.item() != mine.item():
                raise RuntimeError(f"{name} M={tokens}: vLLM pads to {theirs}, we to {mine}")
        runs["vllm_lora"] = lambda i: peer.lora_align(sets[i])
    times = timer.medians(runs, batches, BYTES_PER_CALL, args.budget_ms)
    return {
        "model": name,
        "tokens": tokens,
        "top_k": model.top_k,
        "experts": model.experts,
        "adapters": args.adapters,
        "routing": args.routing,
        "block_size": block_size,
        **{f"{key}_us": us for key, us in times.items() if key.startswith("ours")},
        "rivals": {key: us for key, us in times.items() if not key.startswith("ours")},
    }


def main(argv=None):
    parser = options.parser(
        __doc__, models=["qwen3", "mixtral", "dsv2lite"], tokens=TOKENS, adapters=8, budget_ms=20.0
    )
    parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf"])
    parser.add_argument("--baselines", default="vllm", choices=["vllm", "none"])
    args = parser.parse_args(argv)

    started = time.monotonic()
    vk = vllm.load() if args.baselines == "vllm" else None
    generator = torch.Generator("cuda").manual_seed(1234)
    timer = GraphTimer()
    todo = [(name, m) for name in args.models for m in args.tokens]
    rows = []
    with Progress() as progress:
        bar = progress.add_task("align", total=len(todo))
        for name, tokens in todo:
            if time.monotonic() - started > args.deadline_s:
                print(f"deadline: {len(rows)} of {len(todo)} cases measured")
                break
            rows.append(measure(timer, name, tokens, args, generator, vk))
            progress.advance(bar)
            if args.out:
                results.write(args.out, rows)
    print(tables.made_of(tables.ALIGN, rows))


if __name__ == "__main__":
    main()
