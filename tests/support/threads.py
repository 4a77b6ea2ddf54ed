"""Work of several Python threads at once."""

import threading


def run_threads(work, count):
    """Runs work(0), work(1), ... at once; raises what the first of them raised."""
    errors, start = [], threading.Barrier(count)

    def body(number):
        start.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001, reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=body, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
