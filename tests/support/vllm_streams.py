"""An engine whose workers copy adapters on a simulated stream, for the tests of prefetch.

On the CPU two queues stand for the streams that compute and copy.
"""

from collections import deque
from types import SimpleNamespace

from test_vllm_update import given, serves
from vllm_stand_in_engine import LLM, EngineCore, Executor, Scheduler

ON = 1 << 20  # operations: all that can be done
COPY = 0.04


class Event:
    done = False

    def query(self):
        return self.done


class TwoStreams:
    """The stream that computes and that of copies, on which launched operations are done later."""

    def __init__(self):
        self.queues = {"compute": deque(), "copies": deque()}
        self.waits = 0  # for whole adapters

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

    def arrival(self, layers, last, portions):
        return Arrival(self, layers, last, portions)


class Arrival:
    """Of an adapter whose copies take COPY seconds in all."""

    def __init__(self, streams, layers, last, portions):
        self.streams, self.portions = streams, portions
        self.events = {n: event for n, (_, event) in layers.items()}
        (self.last,) = last.values()

    def done(self):
        return self.last.done

    def bytes_left(self):
        return sum(size for event, size in self.portions if not event.done)

    def rate(self):
        return sum(size for _, size in self.portions) / COPY

    def wait(self):
        self.streams.waits += 1
        self.streams.put("compute", self.last, lambda: None)

    def wait_up_to(self, layer):
        for event in [event for n, event in self.events.items() if n <= layer][-1:]:
            self.streams.put("compute", event, lambda: None)


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
