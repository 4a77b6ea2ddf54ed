"""Clocks and watts: what nvidia-smi's lines say, and of which time."""

import pytest

from benchmarks.compare import power


def test_the_second_half_is_the_working_one(monkeypatch):
    """Every replay takes 1 ms more than the last; a pause comes first."""
    clock = {"now": 0.0, "replays": 0}

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = clock["now"]

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)

    def replay():
        clock["replays"] += 1
        clock["now"] += 1e-3 * clock["replays"]

    class Samples:
        def since(self, start):
            assert start == pytest.approx(power.PAUSE_S + 0.5)
            return 1500.0, 700.0

    monkeypatch.setattr(power.torch.cuda, "Event", Event)
    monkeypatch.setattr(power.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(power.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(power.time, "sleep", lambda s: clock.update(now=clock["now"] + s))
    made = power.rested_and_working(replay, 1.0, Samples())
    # 1 + 2 + ... + 45 ms are a second; the 33rd begins in its second half
    assert clock["replays"] == 45
    assert made == {"rested_us": 5500.0, "working_us": 39000.0, "mhz": 1500.0, "watts": 700.0}
