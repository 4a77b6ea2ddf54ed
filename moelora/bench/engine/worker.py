"""One vLLM engine of `moelora bench engine`, in a process of its own.

    python -m moelora.bench.engine.worker JOB OUT

JOB is a JSON file of the arguments, OUT gets the results after each part. Whether moelora serves
the engine is decided by MOELORA_VLLM, as in production.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moelora.bench.engine.serving import DECODE, speed

ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends `moe_layers` to vLLM's own processes
    "VLLM_NO_USAGE_STATS": "1",
}
UNKNOWN = "unknown"
COMPARED = (2, 64)  # prompts for each adapter, tokens of each


class Engine:
    best = 1  # tokens whose log-probabilities replies have at each step

    def __init__(self, job: dict[str, Any]):
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        adapters = job["adapters"] if job["lora"] else {}
        options: dict[str, Any] = {
            "max_model_len": max(job["prefill"][1], DECODE[1] + job["new"]) + 16,
            "max_num_seqs": max(job["sequences"], job["prefill"][0]),
            "enable_prefix_caching": False,
            "tensor_parallel_size": job["tensor_parallel"],
        }
        if adapters:
            number = len(adapters)
            options |= {"enable_lora": True, "max_loras": number, "max_cpu_loras": number}
            options["max_lora_rank"] = job["max_lora_rank"]
        self.llm = LLM(model=job["model"], **options | job["options"])
        self.vocab = range(self.llm.get_tokenizer().vocab_size)  # without added tokens
        self.names = list(adapters)
        self.adapters = [LoRARequest(n, i, p) for i, (n, p) in enumerate(adapters.items(), 1)]
        self.random = random.Random(1)

    def prompts(self, lengths: Iterable[int]) -> list[list[int]]:
        return [self.random.choices(self.vocab, k=n) for n in lengths]

    def run(self, prompts: list[list[int]], adapters: list[Any], **sampling: Any) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        carried = adapters if any(adapters) else None
        return self.llm.generate(given, params, use_tqdm=False, lora_request=carried)

    def generate(self, prompts: list[list[int]], adapters: list[Any], new: int) -> None:
        self.run(prompts, adapters, max_tokens=new)
        if torch.cuda.is_initialized():  # the engine is in this process
            torch.cuda.synchronize()

    def replies(self, prompts: list[list[int]], adapters: list[Any], new: int) -> list[Any]:
        options = {"max_tokens": new, "logprobs": self.best, "prompt_logprobs": 0}
        return [reply(output) for output in self.run(prompts, adapters, **options)]

    def layers(self) -> str:
        """The experts classes of the model, of all workers; UNKNOWN if vLLM does not tell them."""
        try:
            return ", ".join(sorted(set(self.llm.collective_rpc(moe_layers))))
        except Exception as problem:  # of a release whose workers run no functions
            print(f"no look at the layers: {type(problem).__name__}: {problem}")
            return UNKNOWN


def moe_layers(worker: Any) -> str:
    """The experts classes in a worker's model."""
    found = set()
    for module in worker.get_model().modules():
        method = getattr(module, "quant_method", None)
        for kernel in (getattr(module, "_moe_kernel", None), getattr(method, "moe_kernel", None)):
            if kernel is not None:
                found.add(type(kernel.fused_experts).__name__)
    return ", ".join(sorted(found)) or "no MoE kernel found"


def reply(output: Any) -> dict[str, Any]:
    """A request's result, as plain numbers: `top` has the best tokens at each step."""
    ids = output.prompt_token_ids
    prompt = [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
    top = [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs]
    return {"prompt": prompt, "tokens": list(output.outputs[0].token_ids), "top": top}


def main(job_path: str, out_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    written: dict[str, Any] = {}

    def save(**more: Any) -> None:
        written.update(more)
        Path(out_path).write_text(json.dumps(written))

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm

    engine = Engine(job)
    save(layers=engine.layers(), vllm=vllm.__version__)
    prefill, new = tuple(job["prefill"]), job["new"]
    if engine.adapters:
        count, length = COMPARED
        prompts = engine.prompts([length] * count * len(engine.adapters))
        replies = engine.replies(prompts, engine.adapters * count, 1)
        save(prompts=[reply["prompt"] for reply in replies])

    speed(engine, job["reps"], job["sequences"], save, prefill, new)
    sys.stdout.flush()
    os._exit(0)  # no teardown of the engine


if __name__ == "__main__":
    main(*sys.argv[1:])
