"""Work of several Python threads at once."""

from concurrent.futures import Future
from threading import Barrier, Thread

import torch

WAIT_S = 240


def begin(work, *arguments):
    """The Future of work(*arguments) in a thread of its own, in the grad mode of the caller.

    A thread that hangs is left behind: pools of the standard library would wait for it.
    """
    future, is_grad_enabled = Future(), torch.is_grad_enabled()

    def body():
        try:
            with torch.set_grad_enabled(is_grad_enabled):
                future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001, raised by `result`
            future.set_exception(error)

    Thread(target=body, daemon=True).start()
    return future


def run_threads(work, count):
    """[work(0), work(1), ...], at once; raises what the first of them raised, or TimeoutError."""
    start = Barrier(count)

    def body(number):
        start.wait()
        return work(number)

    return [future.result(WAIT_S) for future in [begin(body, number) for number in range(count)]]


def elsewhere(work):
    """The result of work() in another thread."""
    return begin(work).result(WAIT_S)
