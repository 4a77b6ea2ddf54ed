"""Ctrl-C before any instruction of some modules, again while they deal with it, or the end of the
process."""

import contextlib
import os
import signal
import sys


def at_instruction(call, files, number, act):
    """Calls, with `act` before the instruction of this number of code in `files`, from 1."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            seen += 1
            if seen == number:
                act()
        return trace

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame asked for them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def interrupted(call, files, number, again=None):
    """Calls with a KeyboardInterrupt before that instruction; whether it came. `again`: and with
    another one as that code calls or returns for the `again`th time after the first."""
    calls = 0

    def profile(frame, event, argument):
        nonlocal calls
        calls += frame.f_code.co_filename in files
        if calls == again:
            raise KeyboardInterrupt

    def interrupt():
        if again is not None:
            sys.setprofile(profile)  # as raising here ends the trace
        raise KeyboardInterrupt

    try:
        at_instruction(call, files, number, interrupt)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def killed(call, files, number):
    """Calls in a process that ends before that instruction; whether it did."""
    child = os.fork()
    if child == 0:
        try:
            at_instruction(call, files, number, lambda: os._exit(9))
        except BaseException:  # noqa: BLE001, the process must not go on as a second pytest
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@contextlib.contextmanager
def signals():
    """Yields a function that calls, with a signal's KeyboardInterrupt after so many seconds, and
    says whether it came. pytest-timeout has the same timer: no limit of a test holds inside."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    def interrupted_after(call, seconds):
        try:
            # Another one comes later: Python drops an exception that one raises in a finalizer.
            signal.setitimer(signal.ITIMER_REAL, seconds, 5)
            try:
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)  # as it may have come before that above
            return True
        return False

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield interrupted_after
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
