"""One SGLang server: what its requests get.

    python -m benchmarks.engines.sglang_engine --model /tmp/tiny --out /tmp/run.json

Started by `benchmarks.sglang_e2e`; whether moelora serves the layers is decided by its environment
(`MOELORA_SGLANG`), as in production. The server's log is this one's.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import urllib.request

from benchmarks.engines.answers import check
from benchmarks.engines.jobs import is_up

# Servers share a GPU with others, and are given tokens.
COMMON = ("--skip-tokenizer-init", "--max-total-tokens", "65536")
LORA = ("--enable-lora", "--lora-backend", "triton_v2", "--moe-runner-backend")


class Engine:
    """A server's adapters, as `answers.check` asks for them."""

    def __init__(self, manifest, port):
        self.url, self.vocab = f"http://127.0.0.1:{port}", range(3, manifest["vocab"])
        self.names = self.adapters = [pathlib.Path(f).name for f in manifest["adapters"]]
        self.random = random.Random(1)

    def prompts(self, lengths):
        return [self.random.choices(self.vocab, k=n) for n in lengths]

    def replies(self, prompts, adapters, new):
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new}
        asked = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        asked |= {"logprob_start_len": 0, "top_logprobs_num": 20}
        asked |= {"lora_path": adapters} if any(adapters) else {}
        headers, body = {"Content-Type": "application/json"}, json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [reply(one["meta_info"]) for one in json.load(answer)]


def reply(meta):
    """A request's result, as plain numbers."""
    return {
        "prompt": [lp for lp, *_ in meta["input_token_logprobs"][1:]],
        "tokens": [token for _, token, *_ in meta["output_token_logprobs"]],
        "top": [{str(t): lp for lp, t, *_ in step} for step in meta["output_top_logprobs"]],
    }


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--runner", default="lora_triton", help="SGLang's --moe-runner-backend")
    p.add_argument("--port", type=int, default=30211)
    args = p.parse_args(argv)
    manifest = json.loads((args.model / "manifest.json").read_text())
    folders = [f"{pathlib.Path(f).name}={f}" for f in manifest["adapters"]]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", manifest["base"]]
    command += ["--port", str(args.port), *COMMON, *LORA, args.runner]
    command += ["--max-loras-per-batch", str(len(folders) + 1), "--lora-paths", *folders]
    server, engine = subprocess.Popen(command), Engine(manifest, args.port)
    if not is_up(f"{engine.url}/health", server):
        return "the server has ended"
    args.out.write_text(json.dumps({"check": check(engine)}))
    server.kill()
    server.wait()


if __name__ == "__main__":
    sys.exit(main())
