"""One SGLang server: what its requests get.

    python -m benchmarks.engines.sglang_engine --model /tmp/tiny --out /tmp/run.json

Started by `benchmarks.sglang_e2e`; whether moelora serves the layers is decided by its environment
(`MOELORA_SGLANG`), as in production. The server's log is this one's.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import urllib.request

from benchmarks.engines import answers
from benchmarks.engines.jobs import is_up

# Servers share a GPU with others, and are given tokens.
COMMON = ("--skip-tokenizer-init", "--max-total-tokens", "65536")
LORA = ("--enable-lora", "--lora-backend", "triton_v2", "--moe-runner-backend")


class Engine(answers.Engine):
    """A server on a port of this machine."""

    def __init__(self, folder, port):
        super().__init__(folder)
        self.url = f"http://127.0.0.1:{port}"

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
    engine = Engine(args.model, args.port)
    folders = [f"{folder.name}={folder}" for folder in engine.folders]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", engine.base]
    command += ["--port", str(args.port), *COMMON, *LORA, args.runner]
    command += ["--max-loras-per-batch", str(len(folders) + 1), "--lora-paths", *folders]
    server = subprocess.Popen(command)
    if not is_up(f"{engine.url}/health", server):
        return "the server has ended"
    args.out.write_text(json.dumps({"check": answers.check(engine)}))
    server.kill()
    server.wait()


if __name__ == "__main__":
    sys.exit(main())
