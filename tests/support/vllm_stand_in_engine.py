"""An engine of vLLM 0.33 around its adapters: workers, a scheduler, and what calls them.

Names, signatures and order of calls are those of vLLM's sources.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import torch
from vllm_stand_in_lora import LINEAR, LRUCacheWorkerLoRAManager, R
from vllm_stand_in_runner import CompilationConfig, GPUModelRunner, LoRAMapping


class Worker:
    device = torch.device("cuda", 0)
    use_v2_model_runner = True

    def __init__(self, lora_config):
        manager = LRUCacheWorkerLoRAManager(lora_config)
        self.model_runner = GPUModelRunner(lora_config, manager)
        self.vllm_config = SimpleNamespace(compilation_config=CompilationConfig())

    def execute_dummy_batch(self):
        self.model_runner._dummy_run(1, uniform_decode=True)

    def execute_model(self, scheduler_output):
        return scheduler_output

    def add_lora(self, lora_request):
        return self.model_runner.lora_manager.add_adapter(lora_request)

    def forward(self, rows):
        """A batch of requests and their slots, whose layers are launched unseen."""
        for request, slot in rows:
            self.launch(request, slot)

    def serve(self, request):
        """Products B A of all modules in the slot of a request, as a step reads them."""
        self.add_lora(request)
        inner = self.model_runner.lora_manager._adapter_manager
        return self.products(inner.lora_index_to_id.index(request.lora_int_id))

    def products(self, slot):
        inner = self.model_runner.lora_manager._adapter_manager
        found = {}
        for name, module in inner.modules.items():
            if name == LINEAR:
                found[name] = (module.lora_b_stacked[0] @ module.lora_a_stacked[0])[slot, 0]
                continue
            pairs = [
                *zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True),
                (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]),
            ]
            for projection, (a, b) in zip(
                ("gate_proj", "up_proj", "down_proj"), pairs, strict=True
            ):
                for e, product in enumerate(b[slot] @ a[slot]):
                    found[f"{name}.{e}.{projection}"] = product
        return found


class Scheduler:
    """Requests have a `lora_request`, or None; all that run are in each step."""

    def __init__(self, vllm_config):
        self.lora_config = vllm_config.lora_config
        self.parallel_config = vllm_config.parallel_config
        self.kv_holding_waiting, self.waiting, self.running = deque(), deque(), []
        self.pause_state = 0

    @staticmethod
    def _is_blocked_waiting_status(status):
        return status == "blocked"

    @staticmethod
    def _holds_kv_blocks(request):
        return request.num_computed_tokens > 0

    def _handle_blocked_waiting_request(self, request):
        return not self._is_blocked_waiting_status(request.status)

    def schedule(self):
        loras = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        for queue in (self.kv_holding_waiting, self.waiting):
            for _ in range(len(queue)):
                request = queue.popleft()
                number = request.lora_request and request.lora_request.lora_int_id
                full = number and number not in loras and len(loras) == self.lora_config.max_loras
                if not self._handle_blocked_waiting_request(request) or full:
                    queue.append(request)
                    continue
                self.running.append(request)
                loras |= {number} if number else set()
        return list(self.running)


class Executor:
    """Workers in this process, or `late` ones, which reply when a step is executed."""

    def __init__(self, workers, late=False):
        self.workers, self.late, self.calls = workers, late, []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        future = Future()
        replies = [getattr(worker, method)(*args) for worker in self.workers]
        self.calls.append(lambda: future.set_result(replies))
        if not self.late:
            self.reply()
        return future if non_block else replies

    def reply(self):
        for call in self.calls:
            call()
        self.calls.clear()

    def execute_model(self, requests):
        loras = {id(r.lora_request): r.lora_request for r in requests if r.lora_request}
        for worker in self.workers:
            manager = worker.model_runner.lora_manager
            manager.set_active_adapters([*loras.values()], LoRAMapping((), ()))
            slots = manager._adapter_manager.lora_index_to_id
            worker.forward(
                [(r, slots.index(r.lora_request.lora_int_id)) for r in requests if r.lora_request]
            )
        self.reply()


class EngineCore:
    def __init__(self, scheduler, model_executor):
        self.scheduler, self.model_executor = scheduler, model_executor

    def step(self):
        scheduled = self.scheduler.schedule()
        self.model_executor.execute_model(scheduled)
        return scheduled

    def step_with_batch_queue(self):
        return None, False


class InputProcessor:
    def _validate_lora(self, lora_request):
        pass


class InprocClient:
    pass


class MPClient:
    pass


class LLMEngine:
    """Of one process, or of several workers that only bytes and numbers reach."""

    def __init__(self, workers, max_loras, max_cpu_loras, **more):
        self.lora_config = config = SimpleNamespace(max_lora_rank=R, max_loras=max_loras, **more)
        config.max_cpu_loras = max(max_loras, max_cpu_loras)
        self.workers = [Worker(config) for _ in range(workers)]
        self.engine_core = InprocClient() if workers == 1 else MPClient()
        parallel = SimpleNamespace(world_size=workers, world_size_across_dp=workers)
        parallel.distributed_executor_backend = None
        self.vllm_config = SimpleNamespace(parallel_config=parallel, lora_config=config)
        self.input_processor = InputProcessor()
        self.output_processor = SimpleNamespace(request_states={})

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if len(self.workers) > 1:
            check_plain(args)
        replies = [getattr(worker, method)(*args) for worker in self.workers]
        return json.loads(json.dumps(replies)) if len(self.workers) > 1 else replies

    def awaited(self):
        """The engine, whose calls of workers are awaited from now on."""
        calls = self.collective_rpc

        async def collective_rpc(*args, **kwargs):
            await asyncio.sleep(0)
            return calls(*args, **kwargs)

        self.collective_rpc = collective_rpc
        return self

    def apply_model(self, func):
        return [func(worker.model) for worker in self.workers]

    def add_request(self, request_id, lora_request):
        self.input_processor._validate_lora(lora_request)
        state = SimpleNamespace(lora_name=lora_request.lora_name, lora_request=lora_request)
        self.output_processor.request_states[request_id] = state

    def step(self):
        """What each request is served with, on each rank."""
        states = self.output_processor.request_states.items()
        return {n: [w.serve(s.lora_request) for w in self.workers] for n, s in states}

    def finish(self, request_id):
        del self.output_processor.request_states[request_id]


class LLM:
    def __init__(self, workers=1, max_loras=2, max_cpu_loras=2, **more):
        self.llm_engine = LLMEngine(workers, max_loras, max_cpu_loras, **more)


def check_plain(value):
    """As msgspec encodes it: no tensors, and nothing that takes pickle."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for one in value:
            check_plain(one)
    else:
        assert value is None or isinstance(value, (str, bytes, int, float, bool)), type(value)


PLACES = {
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.engine.core": "EngineCore",
    "vllm.v1.engine.input_processor": "InputProcessor",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.worker.gpu_worker": "Worker",
}
