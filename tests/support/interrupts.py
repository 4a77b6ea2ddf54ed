"""Ctrl-C before any instruction of some modules, again while they deal with it, or the end of the
process."""

import os
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
