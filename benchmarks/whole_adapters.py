"""A decode step of transformers with whole adapters mixed in a batch, beside the base model.

    python -m benchmarks.whole_adapters --out benchmarks/results/h100-whole-adapters.json
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

import argparse
import contextlib
import statistics
import time

import torch
import transformers

import moelora.integrations.transformers as mt
from benchmarks.engines.engine_model import PRESETS
from benchmarks.gpu import capture, free, wait
from benchmarks.models import factors, qwen3_moe
from moelora.bench import results

ADAPTERS = ("a", "b", "c", "d")
PARTS = {
    "mixed": ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "experts": ("experts",),
}
WHAT = ("base", "loaded", *PARTS, "peft", "base")


def load(model, parts, rank):
    sizes = {"max_loras": len(ADAPTERS), "max_rank": rank, "max_linear_rank": rank}
    pool = mt.load_adapters(model, {}, **sizes, targets=parts, w13_slices=1)
    for seed, name in enumerate(ADAPTERS):
        state, config = factors(pool, rank, seed)
        pool.add(name, state, config=config)
    return pool


class Steps:
    """Decode steps of one model and batch over a static cache that begins behind a prompt."""

    def __init__(self, model, rows, prompt, steps):
        self.model, self.steps, self.prompt = model, steps, prompt
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + 4 * steps)
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(2, 4096, (rows, prompt), generator=generator).to(model.device)
        self.position = torch.full((rows, 1), prompt, device=model.device)
        self.token = self.ids[:, :1].clone()

    def prefill(self):
        self.cache.reset()
        return self.model(self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def rewind(self):
        """Back to the end of the prompt, for the next round of steps."""
        for layer in self.cache.layers:
            if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.fill_(self.prompt)

    def step(self):
        return self.model(
            self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True
        ).logits


def timed(steps, runs, device):
    """Microseconds of a step: mode -> a number for each run; the first run warms up. For a mode
    that cannot be, why."""
    steps.prefill()
    calls, found = {}, {"eager": []}
    if device == "cuda":
        found["graph"] = []
        steps.rewind()
        try:
            calls["graph"] = capture(steps.step).replay
        except RuntimeError as error:  # it synchronizes with the host
            torch.cuda.synchronize()
            found["graph"] = str(error).splitlines()[0]
    calls["eager"] = steps.step
    for run in range(runs + 1):
        for mode, call in calls.items():
            steps.rewind()
            wait()
            start = time.perf_counter()
            for _ in range(steps.steps):
                call()
            wait()
            if run:
                found[mode].append((time.perf_counter() - start) / steps.steps * 1e6)
    return found


@contextlib.contextmanager
def wrapped_by_peft(model, rank, implementation):
    """The model with one adapter of PEFT's, of what `mixed` adapts."""
    import peft

    moelora, before = model.config._experts_implementation, model
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(PARTS["attention"]),
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "gate.weight"],
        init_lora_weights=False,
    )
    model.set_experts_implementation(implementation)
    adapted = peft.get_peft_model(model, config).eval().requires_grad_(False)
    try:
        yield adapted.get_base_model()
    finally:
        adapted.unload()
        before.set_experts_implementation(moelora)


def measure(args):
    shape = PRESETS[args.preset]
    model = qwen3_moe(shape, args.layers, args.device, eos_token_id=None)
    model = model.eval().requires_grad_(False)
    implementation = model.config._experts_implementation
    mt.enable(model)
    cases, base = [], {}
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
            steps = Steps(model, args.rows, args.prompt, args.steps)
            found = timed(steps, args.runs, args.device)
        for mode, samples in found.items():
            if isinstance(samples, str):
                cases.append({"what": what, "mode": mode, "rows": args.rows, "skipped": samples})
                continue
            median = statistics.median(samples)
            base.setdefault(mode, median)
            case = {"what": what, "mode": mode, "rows": args.rows, "us": round(median, 1)}
            case |= {"low": round(min(samples), 1), "high": round(max(samples), 1)}
            case |= {"runs": len(samples), "ratio": round(median / base[mode], 3)}
            cases.append(case)
            print(f"{what:10} {mode:8} {median:10.1f} us  {case['ratio']:.3f} of base", flush=True)
        del steps
        free()
    return cases


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="a3b", choices=PRESETS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each row")
    parser.add_argument("--steps", type=int, default=20, help="steps of one sample")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args(argv)
    with torch.inference_mode():
        cases = measure(args)
    if args.out:
        settings = {"transformers": transformers.__version__, "rank": args.rank}
        results.write(args.out, cases, prompt=args.prompt, preset=args.preset, **settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
