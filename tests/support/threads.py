"""Work of several Python threads at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def run_threads(work, count):
    """Runs work(0), work(1), ... at once; raises what the first of them raised."""
    start = Barrier(count)

    def body(number):
        start.wait()
        work(number)

    pool = ThreadPoolExecutor(count)
    list(pool.map(body, range(count), timeout=240))  # TimeoutError where a thread hangs
    pool.shutdown()
