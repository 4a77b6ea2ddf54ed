"""Clock and power of a GPU at work: what `compare times --watts` adds to a turn.

Large batches run at the power cap of a card, which then lowers its clock.
"""

import contextlib
import statistics
import subprocess
import threading
import time

import torch

PAUSE_S, RESTED_CALLS = 0.3, 10
SAMPLE_MS = 20
QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
LIMITS = {  # bits of the last one
    0x4: "power cap",
    0x8: "hardware",
    0x20: "temperature",
    0x40: "temperature, hardware",
    0x80: "power brake",
}


class Sampler:
    """Clock and power of a GPU, as a process of nvidia-smi reports them all the time."""

    def __init__(self):
        self.samples = []  # (time, MHz, watts, bits of LIMITS)
        command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties().uuid}"]
        command += [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        command += [f"--loop-ms={SAMPLE_MS}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # a value is not a number
                mhz, watts, limits = line.split(",")
                known = float(mhz), float(watts), int(limits, 16)
                self.samples.append((time.perf_counter(), *known))

    def since(self, start):
        """{"mhz": median, "watts": mean, "limits": names of LIMITS} since then; {} without a
        sample."""
        found = [sample for sample in list(self.samples) if sample[0] >= start]
        if not found:
            return {}
        _, mhz, watts, bits = zip(*found, strict=True)
        limits = [name for bit, name in LIMITS.items() if any(bit & b for b in bits)]
        mean = round(statistics.fmean(watts), 1)
        return {"mhz": statistics.median(mhz), "watts": mean, "limits": limits}

    def work(self, replay, calls, seconds):
        """A turn of a graph of so many calls after a pause: microseconds of a call at first, and
        with what `since` returns and the joules of a call, of the second half of `seconds`."""
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        start, took, half = time.perf_counter(), [], None
        while (now := time.perf_counter()) < start + seconds:
            if half is None and now >= start + seconds / 2:
                half = len(took)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            took.append((begin, end))
            if len(took) >= RESTED_CALLS:  # not further ahead than that
                took[-RESTED_CALLS][1].synchronize()
        turn = self.since(start + seconds / 2)
        torch.cuda.synchronize()
        us = [1e3 * begin.elapsed_time(end) / calls for begin, end in took]
        turn["rested_us"] = statistics.median(us[:RESTED_CALLS])
        turn["us"] = statistics.median(us[half or 0 :])
        if "watts" in turn:
            turn["joules"] = 1e-6 * turn["us"] * turn["watts"]
        return turn
