"""Work of several Python threads at once."""

from concurrent.futures import Future
from threading import Barrier, Thread

import torch


def run_threads(work, count):
    """[work(0), work(1), ...], at once, in the grad mode of the caller.

    Raises what the first of them raised, or TimeoutError where one hangs, which is left behind: a
    pool of the standard library would wait for it.
    """
    start, results = Barrier(count), [Future() for _ in range(count)]
    is_grad_enabled = torch.is_grad_enabled()

    def body(number):
        start.wait()
        try:
            with torch.set_grad_enabled(is_grad_enabled):
                results[number].set_result(work(number))
        except BaseException as error:  # noqa: BLE001, raised by `result`
            results[number].set_exception(error)

    for number in range(count):
        Thread(target=body, args=(number,), daemon=True).start()
    return [result.result(timeout=240) for result in results]


def elsewhere(work):
    """The result of work() in another thread."""
    return run_threads(lambda _: work(), 1)[0]
