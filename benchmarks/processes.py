"""Work in processes of its own, which give a GPU back and whose failures are answers."""

import multiprocessing
import time
import traceback
from multiprocessing import connection


def apart(work, arguments, seconds=86400.0, preload=()):
    """Yield what the generators `work(*each)` yield, one process for each of `arguments`.

    The last answer is {"error": why} if a process fails or ends, or after `seconds`. Processes that
    still run are killed then. `preload`: modules that are imported once for all processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    processes, running, until = [], [], time.monotonic() + seconds
    try:
        for each in arguments:
            pipe, end = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(end, work, each))
            process.start()
            processes.append(process)
            running.append(pipe)
            end.close()
        while running:
            ready = connection.wait(running, max(0.0, until - time.monotonic()))
            for pipe in ready or [None]:
                try:
                    answer = pipe.recv() if pipe else {"error": f"stopped after {seconds:.0f} s"}
                except EOFError:
                    answer = {"error": "a process ended before its work"}
                if answer is None:  # the pipe's last
                    running.remove(pipe)
                    continue
                yield answer
                if "error" in answer:
                    return
    finally:
        for process in processes:
            process.kill()
            process.join()


def _send(pipe, work, arguments):
    try:
        for answer in work(*arguments):
            pipe.send(answer)
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    pipe.send(None)  # the last one
