"""A loop of GRPO: vLLM samples, transformers trains adapters of the experts, and pushes them.

    python -m benchmarks.rl_loop --layers 12 --formats bf16,fp8,send --out h200-rl.json

A checkpoint of random weights is made (`engine_model`, `vllm_quantize`); the reward of an answer is
the share of its tokens that are below VOCAB / 4. Each format runs in a process of its own:

rl_gap       log-probabilities of sampled tokens, sampler and trainer: the usual pair (a copy in
             bf16, transformers' experts), the sampler's experts, and with its routing replayed
rl_memory    MiB of the process before and after the trainer's experts are the sampler's
rl_reward    of each step
rl_phase     ms of a step by phase, the median
rl_update    ms of `update_adapters`, idle and while requests run, and the share that is left of
             their tokens/s
rl_send      ms to send the whole bf16 model, a parameter at a time as TRL does, without merging;
             "send" among the formats measures it, in an engine without adapters

"updates" among the formats measures rl_update alone, without a trainer or a checkpoint.
"""

import contextlib
import pathlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from benchmarks.engines import engine_model, vllm_quantize
from benchmarks.engines.jobs import write_entry_points
from benchmarks.gpu import free, timed
from benchmarks.models import factors, moe_layers
from benchmarks.options import parser, report
from benchmarks.processes import apart

RANK, LR = 16, 5e-3
PROMPT = list(range(3, 19))
BELOW = engine_model.VOCAB // 4
device = engine_model.device


class Transformers:
    """A sampler that is a model of transformers: one beside the trainer, or the trainer itself."""

    busy = None

    def __init__(self, folder, args):
        self.model = trainer(folder)

    def sample(self, rows, new):
        """Tokens (rows, prompt + new), their log-probabilities (rows, new), and their experts."""
        import moelora.integrations.transformers as mt

        prompt = torch.tensor([PROMPT] * rows, device=device())
        options = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 1}
        with mt.record_routing(self.model, rows) as routing:
            out = self.model.generate(
                prompt, do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=None, **options
            )
        logits = torch.stack(out.logits, 1)
        return out.sequences, logprobs(logits, out.sequences[:, len(PROMPT) :]), routing.ids()

    def share(self, model):
        self.model = model

    def push(self, slot):
        """Nothing: the slot that it samples from is the trainer's."""
        return 0


class Vllm:
    """The engine, in this process."""

    request = None

    def __init__(self, folder, args, lora=True, **more):
        import benchmarks.engines.vllm_engine  # noqa: F401, sets vLLM's environment

        plugin = args.work / "plugin"
        if not plugin.exists():
            write_entry_points(plugin)
        sys.path.append(str(plugin))  # where vLLM finds the plugin of this checkout
        from vllm import LLM

        options = {"dtype": "bfloat16", "max_model_len": 2048, "skip_tokenizer_init": True}
        sizes = sorted({1, 2, 4, *range(8, args.group, 8), args.group})
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        options |= {"max_num_seqs": sizes[-1], "compilation_config": {"mode": 0} | graphs}
        if lora:  # slots for the version that runs, the last and the new one
            options |= {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
            # which vLLM takes with prefix caching only, its default
            options |= {"enable_return_routed_experts": True}
        self.llm = LLM(str(folder), gpu_memory_utilization=args.memory, **options, **more)

    def ends(self, new):
        from vllm import SamplingParams

        return SamplingParams(max_tokens=new, detokenize=False, ignore_eos=True, logprobs=0)

    def sample(self, rows, new):
        prompts, lora = [{"prompt_token_ids": PROMPT}] * rows, {"lora_request": self.request}
        out = self.llm.generate(prompts, self.ends(new), use_tqdm=False, **lora)
        found = [one.outputs[0] for one in out]
        tokens = torch.tensor([PROMPT + list(one.token_ids) for one in found], device=device())
        theirs = [[next(iter(at.values())).logprob for at in one.logprobs] for one in found]
        theirs = torch.tensor(theirs, device=device())
        return tokens, theirs, [one.routed_experts for one in found]

    def share(self, model):
        import moelora.integrations.transformers as mt

        self.shared = mt.share_experts(model, self.llm)

    def push(self, slot):
        """Bytes of the factors that the engine now serves."""
        from moelora.integrations.vllm import update_adapters

        given = slot.tensors(host=False)
        self.ms, found = timed_ms(lambda: update_adapters(self.llm, {"law": given}))
        self.request = found["law"]
        return sum(t.nbytes for t in given[1].values())

    def send(self, model):
        """As TRL's sync_weights does it."""
        inner = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        for name, parameter in model.named_parameters():
            inner.load_weights([(name, parameter.data)])

    def busy(self, slot, every):
        """Tokens/s of 32 requests, and ms of updates every so many seconds."""
        engine, took = self.llm.llm_engine, []
        for n in range(32):
            prompt = {"prompt_token_ids": [n + 3] * 32}
            engine.add_request(f"{every}-{n}", prompt, self.ends(256), lora_request=self.request)
        start = last = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            if time.perf_counter() - last > every:
                self.push(slot)
                took.append(self.ms)
                last = time.perf_counter()
        return 32 * 256 / (time.perf_counter() - start), took


def random_slot(shape):
    """Random factors of all experts, as a `LoraSlot` gives them."""
    layers = {layer.name: layer for layer in moe_layers(shape, shape.layers)}
    adapted = SimpleNamespace(layers=layers, linears={}, device=device(), dtype=torch.float32)
    state, config = factors(adapted, RANK, 0, "peft")
    names = [f"{name}.{stack}" for name in layers for stack in ("gate_up_proj", "down_proj")]
    config |= {"lora_alpha": 2 * RANK, "target_modules": [], "target_parameters": names}
    state = {f"base_model.model.{key}": factor for key, factor in state.items()}
    return SimpleNamespace(tensors=lambda host: (config, state))


def timed_ms(call):
    """(milliseconds, result) of a call."""
    seconds, result = timed(call)
    return 1e3 * seconds, result


def trainer(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.requires_grad_(False).to(device())


def logprobs(logits, tokens):
    return -F.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none")


def trained(model, tokens):
    """Log-probabilities of the answers in the trainer's forward."""
    out = model(tokens, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    return logprobs(out, tokens[:, len(PROMPT) :])


def memory():
    """MiB that tensors of this process hold."""
    free()
    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else None


def checkpoint(format, args):
    """(folder of the sampler, folder of the trainer)."""
    plain, folder = args.work / "bf16", args.work / format
    if not plain.exists():
        engine_model.write(plain, engine_model.QWEN3, shape(args), [])
    if not folder.exists():
        vllm_quantize.write(plain, format, folder)
    return folder / "base", plain / "base"


def shape(args):
    found = engine_model.PRESETS[args.preset]
    return replace(found, layers=args.layers or found.layers)


def gaps(format, model, sampler, args):
    """Cases of one batch, one by one; shares the experts between the pairs."""
    import moelora.integrations.transformers as mt

    def case(pair, replay):
        tokens, theirs, ids = sampler.sample(args.group, args.new)
        routing = mt.replay_routing(model, ids) if replay else contextlib.nullcontext()
        with torch.no_grad(), routing:
            gap = (trained(model, tokens) - theirs).abs()
        case = {"topic": "rl_gap", "format": format, "pair": pair}
        return case | {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": gap.numel()}

    yield case("usual", False)
    before = memory()
    sampler.share(model)
    mt.enable(model)
    for shared, mib in ((False, before), (True, memory())):
        yield {"topic": "rl_memory", "format": format, "shared": shared, "mib": mib}
    yield case("shared", False)
    yield case("shared, replayed", True)


def loop(format, model, sampler, args):
    """Steps of GRPO on one policy: cases of rewards, of phases and of updates, one by one."""
    import moelora.integrations.transformers as mt
    from moelora.training import LoraSlot, set_adapters

    mt.multi_lora(model, slots=1, max_rank=RANK)
    slot = LoraSlot(model, 0).open(rank=RANK, generator=torch.Generator().manual_seed(0))
    set_adapters(model, torch.zeros(1, dtype=torch.int32, device=device()))
    optimizer = torch.optim.AdamW(slot.parameters(), lr=LR)
    sampler.push(slot)
    phases = []
    for step in range(args.steps):
        sampled, (tokens, _, ids) = timed_ms(lambda: sampler.sample(args.group, args.new))
        reward = (tokens[:, len(PROMPT) :] < BELOW).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)

        def backward(tokens=tokens, ids=ids, advantage=advantage):
            with mt.replay_routing(model, ids):
                (-(advantage[:, None] * trained(model, tokens)).mean()).backward()

        took = {"sample": sampled, "backward": timed_ms(backward)[0]}
        took["optimizer"] = timed_ms(optimizer.step)[0]
        optimizer.zero_grad()
        took["update"], _ = timed_ms(lambda: sampler.push(slot))
        phases.append(took)
        yield {"topic": "rl_reward", "format": format, "step": step, "reward": reward.mean().item()}
    medians = {f"{key}_ms": statistics.median(p[key] for p in phases) for key in phases[0]}
    yield {"topic": "rl_phase", "format": format, "rows": args.group} | medians
    if sampler.busy:
        yield from updates(format, sampler, slot, args)


def updates(format, sampler, slot, args):
    """Cases of updates, idle and under load."""
    idle = []
    for _ in range(6):
        nbytes = sampler.push(slot)
        idle.append(sampler.ms)
    alone, _ = sampler.busy(slot, float("inf"))
    rate, under = sampler.busy(slot, args.every)
    row = {"topic": "rl_update", "format": format, "mib": nbytes / 2**20, "every_s": args.every}
    for what, ms, share in (("idle", idle[1:], None), ("under load", under, rate / alone)):
        spread = {"ms": statistics.median(ms), "low": min(ms), "high": max(ms)} if ms else {}
        yield row | {"what": what, "share": share} | spread


def updates_alone(args):
    """Cases of updates of an engine without a checkpoint, with random factors."""
    folder, sizes = args.work / "updates", shape(args)
    engine_model.save_json(folder / "config.json", engine_model.settings(sizes))
    engine = Vllm(folder, args, load_format="dummy")
    yield from updates("bf16", engine, random_slot(sizes), args)


def send(args):
    """The case of sending a whole model, the second time."""
    folder, plain = checkpoint("bf16", args)
    sampler, model = Vllm(folder, args, lora=False), trainer(plain)
    took = [timed_ms(lambda: sampler.send(model))[0] for _ in range(2)]
    row = {"topic": "rl_send", "what": "the whole model", "format": "bf16"}
    yield row | {"mib": sum(p.nbytes for p in model.parameters()) / 2**20, "ms": took[-1]}


def sample_and_train(format, args):
    """Cases of a loop with a sampler of a format."""
    folder, plain = checkpoint(format, args)
    free()  # what drew the weights: vLLM counts what the process holds
    torch.manual_seed(0)
    sampler = {"vllm": Vllm, "transformers": Transformers}[args.sampler](folder, args)
    model = trainer(plain)
    yield from gaps(format, model, sampler, args)
    yield from loop(format, model, sampler, args)


def cases_of(format, args):
    alone = {"updates": updates_alone, "send": send}
    return alone[format](args) if format in alone else sample_and_train(format, args)


def cases(args):
    """Cases of all formats, as they are measured; the last one of a format that fails says why."""
    several = len(args.formats) > 1  # an engine does not give back a GPU
    for format in args.formats:
        for case in apart(cases_of, [(format, args)]) if several else cases_of(format, args):
            yield {"topic": "rl_error", "format": format} | case


def main(argv=None):
    p = parser(
        __doc__,
        layers=(0, "of the model; 0: the preset's"),
        formats=(["bf16", "fp8"], "of the sampler; send; updates"),
        steps=20,
        group=(128, "answers of a step"),
        new=(32, "tokens of an answer"),
        every=(0.3, "seconds between updates under load"),
        memory=(0.45, "vLLM's gpu_memory_utilization"),
        preset=("a3b", "of the model", engine_model.PRESETS),
        sampler=("vllm", "of answers", ("vllm", "transformers")),
    )
    p.add_argument("--work", type=pathlib.Path, help="folder for checkpoints, kept")
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or pathlib.Path(folder)
        return int(any("error" in case for case in report(cases(args), args.out)))


if __name__ == "__main__":
    sys.exit(main())
