"""Ctrl-C before any instruction of some modules, and again while they deal with it."""

import sys


def interrupted(call, files, number, again=None):
    """Calls with a KeyboardInterrupt before the instruction of this number of code in `files`;
    whether it came. `again`: and with another one as that code calls or returns for the `again`th
    time after the first."""
    seen = calls = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                if again is not None:
                    sys.setprofile(profile)  # as raising here ends this trace
                raise KeyboardInterrupt
        return trace

    def profile(frame, event, argument):
        nonlocal calls
        calls += frame.f_code.co_filename in files
        if calls == again:
            raise KeyboardInterrupt

    before = sys.gettrace()
    # Python 3.12 reports instructions only if a frame asked for them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        sys.setprofile(None)
    return False
