"""How vLLM 0.33's workers run batches, as far as adapters are concerned.

Names, signatures and order of calls are those of vLLM's sources.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass
class LoRAMapping:
    """Ids of adapters, 0 for none."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False
    type: str = "LANGUAGE"

    def __post_init__(self):
        assert self.type == "LANGUAGE"


def warmup_requests(count):
    return {LoRARequest(f"warmup_{n}", n, "/not/a/real/path") for n in range(1, count + 1)}


class LoRAModelRunnerMixin:
    def _set_active_loras(
        self, prompt_lora_mapping, token_lora_mapping, lora_requests, mapping_type="LANGUAGE"
    ):
        mapping = LoRAMapping(token_lora_mapping, prompt_lora_mapping, True, mapping_type)
        self.lora_manager.set_active_adapters(lora_requests, mapping)

    @contextmanager
    def maybe_setup_dummy_loras(self, lora_config, remove_lora=True):
        for request in warmup_requests(lora_config.max_loras):
            self.lora_manager.add_dummy_lora(request, rank=8)
        yield
        if remove_lora:
            self.lora_manager.remove_all_adapters()

    @contextmanager
    def maybe_select_dummy_loras(
        self, lora_config, num_scheduled_tokens, mapping_type="LANGUAGE", num_sampled_tokens=None,
        num_active_loras=0,
    ):  # fmt: skip
        count = min(num_active_loras, lora_config.max_loras)
        prompts = [n % count + 1 if count else 0 for n in range(len(num_scheduled_tokens))]
        sampled, tokens = (
            tuple(p for p, n in zip(prompts, numbers, strict=True) for _ in range(n))
            for numbers in (num_sampled_tokens or [1] * len(prompts), num_scheduled_tokens)
        )
        self._set_active_loras(sampled, tokens, warmup_requests(count), mapping_type)
        yield

    @contextmanager
    def maybe_dummy_run_with_lora(
        self, lora_config, num_scheduled_tokens, num_sampled_tokens, remove_lora=True,
        num_active_loras=0, mapping_type="LANGUAGE",
    ):  # fmt: skip
        tokens = num_scheduled_tokens, mapping_type, num_sampled_tokens
        with (
            self.maybe_setup_dummy_loras(lora_config, remove_lora),
            self.maybe_select_dummy_loras(lora_config, *tokens, num_active_loras),
        ):
            yield


class GPUModelRunner(LoRAModelRunnerMixin):
    """Model runner V2; a test replaces `execute_model`."""

    def __init__(self, lora_config, lora_manager):
        self.lora_config, self.lora_manager = lora_config, lora_manager

    def execute_model(self):
        pass

    def _dummy_run(self, num_tokens, uniform_decode=False):
        with self.maybe_dummy_run_with_lora(
            self.lora_config,
            num_scheduled_tokens=[num_tokens] if uniform_decode else [1] * num_tokens,
            num_sampled_tokens=None,
            remove_lora=True,
            num_active_loras=self.lora_config.max_loras,
        ):
            self.execute_model()

    def profile_run(self):
        self._dummy_run(8)

    def capture_model(self):
        with self.maybe_setup_dummy_loras(self.lora_config):
            for count in (0, self.lora_config.max_loras + 1):
                with self.maybe_select_dummy_loras(
                    self.lora_config, [1] * 8, num_active_loras=count
                ):
                    self.execute_model()


class CompilationConfig:
    splitting_ops = ("vllm::unified_attention_with_output",)

    def splitting_ops_contain_attention(self):
        return "vllm::unified_attention_with_output" in self.splitting_ops


class CudaGraphManager:
    def __init__(self, graphs):
        self.graphs = graphs

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()


class Attention:
    pass


LAYER = Attention()


def get_attention_context(layer_name):
    return None, LAYER, None, None


class GPUModelRunnerV1(GPUModelRunner):
    def _dummy_run(self, num_tokens, uniform_decode=False, remove_lora=True, num_active_loras=0):
        tokens = [num_tokens] if uniform_decode else [1] * num_tokens
        sampled = [2] * len(tokens)  # of each prompt; vLLM passes 1, which is the default
        with self.maybe_dummy_run_with_lora(
            self.lora_config, tokens, sampled, remove_lora, num_active_loras
        ):
            self.execute_model()

    def capture_model(self):
        for count in (0, self.lora_config.max_loras):
            self._dummy_run(8, remove_lora=False, num_active_loras=count)
        self.lora_manager.remove_all_adapters()


PLACES = {
    "vllm.config.compilation": "CompilationConfig",
    "vllm.lora.request": "LoRARequest",
    "vllm.model_executor.layers.attention.attention": "Attention get_attention_context",
    "vllm.v1.worker.gpu.cudagraph_utils": "CudaGraphManager",
    "vllm.v1.worker.lora_model_runner_mixin": "LoRAModelRunnerMixin",
}
