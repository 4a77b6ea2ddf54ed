"""An engine whose workers copy adapters on a simulated stream, for the tests of prefetch.

On the CPU two queues stand for the streams that compute and copy.
"""

import random
from collections import deque
from types import SimpleNamespace

from test_vllm_update import given, serves
from vllm_stand_in_engine import LLM, EngineCore, Executor, Scheduler

ON = 1 << 20  # operations: all that can be done
COPY = 0.04  # seconds that all copies of an adapter take


class Event:
    done = False

    def query(self):
        return self.done

    def elapsed_time(self, end):
        return 1000 * COPY


class TwoStreams:
    """The stream that computes and that of copies, on which launched operations are done later."""

    def __init__(self):
        self.queues = {"compute": deque(), "copies": deque()}
        self.waits = 0

    def put(self, stream, event, operation):
        """`operation` is done after `event`; returns the event after it."""
        after = Event()
        self.queues[stream].append((event, operation, after))
        return after

    def advance(self, *streams, operations=ON):
        for name in streams:
            queue = self.queues[name]
            for _ in range(min(operations, len(queue))):
                event, operation, after = queue[0]
                if event is not None and not event.done:
                    break
                operation()
                after.done = True
                queue.popleft()

    # What `activation` calls, of `transfer`.

    def __call__(self, devices):
        return self

    def record(self, device):
        return self.put("compute", None, lambda: None)

    def run_each(self, device, copies, after=None, timed=False):
        return [self.put("copies", after, copy) for copy in copies]

    # What `Arrival` calls, of the stream that computes.

    def wait_event(self, event):
        self.waits += 1
        self.put("compute", event, lambda: None)


class Engine:
    """A loop of an engine, its workers, and what their batches have read from slots.

    Adapters have names of one letter, and the seed of each is its place among `names`.
    """

    def __init__(self, update, names, workers=1, late=False, slots=3, **more):
        self.seeds = seeds = {name: n for n, name in enumerate(names, 1)}
        self.llm = LLM(workers, max_loras=slots, max_cpu_loras=len(names), **more)
        self.workers = self.llm.llm_engine.workers
        self.requests = update.update_adapters(self.llm, {n: given(s) for n, s in seeds.items()})
        self.scheduler = Scheduler(self.llm.llm_engine.vllm_config)
        self.core = EngineCore(self.scheduler, Executor(self.workers, late))
        self.read = []  # (adapter, products)

    def add(self, name, status=None):
        lora = name and self.requests[name]
        request = SimpleNamespace(name=name, lora_request=lora, status=status)
        request.num_computed_tokens = 0
        self.scheduler.waiting.append(request)
        return request

    def step(self):
        return [request.name for request in self.core.step()]

    def finish(self, request):
        self.scheduler.running.remove(request)

    def serve(self, *names):
        """A request of each adapter, one after the other."""
        for name in names:
            request = self.add(name)
            self.step()
            self.streams.advance("compute", "copies", "compute")
            self.finish(request)

    def draw_steps(self, order, seed, names, operations, begin=lambda step: None):
        """250 steps with requests of random `names`, whose streams advance in an order, if it is
        random by at most so many `operations` a step; returns the names."""
        draws, drawn = random.Random(seed), set()
        for step in range(250):
            for _ in range(draws.choice([0, 1, 1, 2]) if step < 60 else 0):
                request = self.add(draws.choice(names))
                request.left = draws.randint(1, 4)
                drawn.add(request.name)
            begin(step)
            self.step()
            for request in list(self.scheduler.running):
                request.left -= 1
                if not request.left:
                    self.finish(request)
            if order == "random":
                for name in draws.sample(["compute", "copies"], 2):
                    self.streams.advance(name, operations=draws.randint(0, operations))
            else:
                queues = sorted(self.streams.queues, reverse=order == "copies first")
                self.streams.advance(*queues)
        while any(self.streams.queues.values()):
            self.streams.advance("copies", "compute")
        return drawn

    def check(self):
        """What batches have read is what their adapters hold; forgets it."""
        assert self.read
        for name, products in self.read:
            serves([{key: t.cpu() for key, t in products.items()}], self.seeds[name])
        self.read.clear()

    def inner(self):
        return self.workers[0].model_runner.lora_manager._adapter_manager

    def here(self):
        """Names of the adapters in the slots of the first worker."""
        names = {r.lora_int_id: n for n, r in self.requests.items()}
        return [names.get(number) for number in self.inner().lora_index_to_id]
