"""A decode step of transformers with whole adapters mixed in a batch, beside the base model.

    python -m benchmarks.whole_adapters --preset micro --layers 2 --device cpu

A Qwen3-MoE of random weights, and four adapters of attention, the router and all experts. One step
is one token for every row, over a static cache: `graph` replays a CUDA graph of it, `eager` is a
plain call, alone on a CPU. Each is timed over `--steps` steps, in turn with the other, `--runs`
times.

    base      moelora.integrations.transformers.enable(model)
    loaded    after load_adapters, only rows of the base model
    mixed     after load_adapters, row i with adapter i % 4
    attention, experts   as mixed, with factors of these layers only
    peft      PEFT's own, one adapter for all rows, experts as transformers runs them

`ratio` is over the first `base` in the same mode; the last one tells how far the clock has drifted.
"""

import contextlib
import statistics

import torch
import transformers

import moelora.integrations.transformers as mt
from benchmarks.engines.engine_model import PRESETS
from benchmarks.gpu import capture, free, timed
from benchmarks.models import factors, qwen3_moe
from benchmarks.options import DEVICES, parser, report

ADAPTERS = ("a", "b", "c", "d")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = {
    "mixed": (*ATTENTION, "gate", "experts"),
    "attention": ATTENTION,
    "experts": ("experts",),
}
WHAT = ("base", "loaded", *PARTS, "peft", "base")


def load(model, parts, rank):
    sizes = {"max_loras": len(ADAPTERS), "max_rank": rank, "max_linear_rank": rank}
    pool = mt.load_adapters(model, {}, **sizes, targets=parts, w13_slices=1)
    for seed, name in enumerate(ADAPTERS):
        state, config = factors(pool, rank, seed)
        pool.add(name, state, config=config)


class Steps:
    """Decode steps of one model and batch over a static cache that begins behind a prompt."""

    def __init__(self, model, rows, prompt, steps):
        self.model, self.prompt = model, prompt
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + 4 * steps)
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(2, 4096, (rows, prompt), generator=generator).to(model.device)
        self.position = torch.full((rows, 1), prompt, device=model.device)
        self.token = ids[:, :1].clone()
        model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def rewind(self):
        """Back to the end of the prompt, for the next round of steps."""
        for layer in self.cache.layers:
            if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.fill_(self.prompt)

    def step(self):
        return self.model(
            self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True
        ).logits


def modes(args, model):
    """{mode: microseconds of a step for each run, or why it cannot be}; the first run warms up."""
    steps = Steps(model, args.rows, args.prompt, args.steps)
    calls, found = {"eager": steps.step}, {"eager": []}
    if args.device == "cuda":
        steps.rewind()
        try:
            calls, found["graph"] = {"graph": capture(steps.step).replay} | calls, []
        except RuntimeError as error:  # it synchronizes with the host
            torch.cuda.synchronize()
            found["graph"] = str(error).splitlines()[0]
    for run in range(args.runs + 1):
        for mode, call in calls.items():
            steps.rewind()
            seconds, _ = timed(lambda call=call: [call() for _ in range(args.steps)])
            if run:
                found[mode].append(1e6 * seconds / args.steps)
    return found


@contextlib.contextmanager
def wrapped_by_peft(model, rank, implementation):
    """The model with one adapter of PEFT's, of what `mixed` adapts."""
    import peft

    moelora, before = model.config._experts_implementation, model
    targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}
    targets |= {"target_modules": [*ATTENTION], "init_lora_weights": False}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, **targets)
    model.set_experts_implementation(implementation)
    adapted = peft.get_peft_model(model, config).eval().requires_grad_(False)
    try:
        yield adapted.get_base_model()
    finally:
        adapted.unload()
        before.set_experts_implementation(moelora)


def cases(args):
    """A case for each model and mode, as they are measured."""
    model = qwen3_moe(PRESETS[args.preset], args.layers, args.device, eos_token_id=None)
    model = model.eval().requires_grad_(False)
    implementation = model.config._experts_implementation
    mt.enable(model)
    base = {}
    for what in WHAT:
        with contextlib.ExitStack() as stack:
            if what == "peft":
                stack.enter_context(wrapped_by_peft(model, args.rank, implementation))
            elif what != "base":
                load(model, PARTS.get(what, PARTS["mixed"]), args.rank)
                stack.callback(mt.unload_adapters, model)
            if what in PARTS:
                names = [ADAPTERS[i % len(ADAPTERS)] for i in range(args.rows)]
                stack.enter_context(mt.use_adapters(model, names))
            found = modes(args, model)
        for mode, us in found.items():
            case = {"what": what, "mode": mode, "rows": args.rows}
            if isinstance(us, str):
                yield case | {"skipped": us}
                continue
            median = statistics.median(us)
            ratio = round(median / base.setdefault(mode, median), 3)
            case |= {"us": round(median, 1), "low": round(min(us), 1), "high": round(max(us), 1)}
            yield case | {"runs": len(us), "ratio": ratio}
        free()


def main(argv=None):
    p = parser(
        __doc__,
        layers=12,
        rank=(16, "of the adapters"),
        rows=(16, "of the batch"),
        prompt=(256, "tokens of each row"),
        steps=(20, "of one sample"),
        runs=(5, "samples of a mode"),
        preset=("a3b", "of the model", PRESETS),
        device=("cuda", "of the model", DEVICES),
    )
    args = p.parse_args(argv)
    settings = {name: getattr(args, name) for name in ("prompt", "preset", "rank")}
    with torch.inference_mode():
        report(cases(args), args.out, transformers=transformers.__version__, **settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
