"""The model of a device that chooses tiles where nothing was measured, beside what was measured."""

import re

import pytest
from c_programs import run
from plan_cases import ROWS, asked, print_plan

H200 = ("on", 132, 4800)  # SMs, GB/s
KINDS = {
    "A100": (80, "on", 108, 2039),
    "A10": (86, "on", 72, 600),
    "L40S": (89, "on", 142, 864),
    "H100 PCIe": (90, "on", 114, 2039),
    "H20": (90, "on", 78, 4000),
    "B200": (100, "on", 148, 8000),
    "RTX 5090": (120, "on", 170, 1792),
}
FORMATS = ["native", "mxfp4", "int4", "fp8", "w8a8"]
# Rows of an expert on average, one expert for each token.
LOADS = [*range(1, 48), *range(48, 200, 4), 220, 256, 320, 400, 512, 800, 1024, 4096]


def tiles(capability, *device, format="native", loads=LOADS, **env):
    """[({name: nanoseconds}, the chosen name)] for each load of an expert."""
    lines = [f"bfloat16 {rows} 1 1 1 2048 768 0 cuda {capability}" for rows in loads]
    words = [str(word) for word in ("tiles", *device, "formats", format, format)]
    done = run(print_plan(), *words, stdin="\n".join(lines), **env)
    assert done.returncode == 0, done.stderr
    answers = []
    for line in done.stdout.splitlines():
        found = re.findall(r"(\[?)(\w+)=([\d.]+)\]?", line)
        (chosen,) = [name for bracket, name, _ in found if bracket]
        answers.append(({name: float(ns) for _, name, ns in found}, chosen))
    return answers


def rows_of(name):
    return ROWS[name].block_m


def test_gpus_of_the_measured_chip_have_its_choices():
    for format in FORMATS:
        want = [chosen for _, chosen in tiles(90, *H200, format=format)]
        for gpu in (("on", 132, 3350), ("on", 132, 4000), ()):  # H100, GH200, unknown
            assert [chosen for _, chosen in tiles(90, *gpu, format=format)] == want


@pytest.mark.parametrize("most", ["80", "90"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_model_agrees_with_what_was_measured(format, most):
    """On an H200: with most choices, and everywhere with one of them or its neighbor."""
    agreed = total = 0
    for times, chosen in tiles(90, *H200, format=format, MOELORA_MAX_CC=most):
        family = chosen.rsplit("_", 1)[1]
        times = {name: ns for name, ns in times.items() if name.endswith(family)}
        assert times[chosen] < 1.5 * min(times.values())
        blocks = sorted({rows_of(name) for name in times})
        near = {rows_of(name) for name, ns in times.items() if ns <= 1.02 * min(times.values())}
        agreed += rows_of(chosen) in near
        total += 1
        steps = min(abs(blocks.index(rows_of(chosen)) - blocks.index(n)) for n in near)
        assert steps <= 1 or times[chosen] < 1.1 * min(times.values())
    assert agreed >= 0.75 * total, (agreed, total)


@pytest.mark.parametrize("kind", KINDS)
def test_other_gpus_have_the_choices_of_their_model(kind):
    for format in FORMATS:
        for rows, (times, chosen) in zip(LOADS, tiles(*KINDS[kind], format=format), strict=True):
            newest = max(ROWS[name].family for name in times)
            times = {name: ns for name, ns in times.items() if ROWS[name].family == newest}
            assert times[chosen] <= 1.0101 * min(times.values()), (format, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_modeled_gpu_follow_the_rows_of_an_expert(kind):
    blocks = [rows_of(chosen) for _, chosen in tiles(*KINDS[kind])]
    until = LOADS.index(96)
    assert blocks[: until + 1] == sorted(blocks[: until + 1])
    assert blocks[0] == 16 and blocks[-1] >= 96


def test_a_gpu_is_its_own():
    """More bandwidth for the same products: to read an expert twice costs less."""

    def last_small(kind):
        blocks = [rows_of(chosen) for _, chosen in tiles(*KINDS[kind])]
        return max(rows for rows, block in zip(LOADS, blocks, strict=True) if block <= 32)

    choices = {kind: tuple(c for _, c in tiles(*KINDS[kind])) for kind in KINDS}
    assert len(set(choices.values())) >= 5
    assert last_small("L40S") > last_small("B200")


def test_the_log_has_every_tile_of_a_modeled_gpu():
    line = r"^moelora:   tile (\w+): [\d.]+ ns for 1000 weights(?:, (.*))?$"

    def log(*device):
        done = asked(("cuda", 80), *device, tokens=512, env={"MOELORA_LOG": "plan"})
        return done.stdout.split()[0], re.findall(line, done.stderr, re.M)

    chosen, listed = log("on", "108", "2039")
    assert [name for name, why in listed if not why] == [chosen]
    slower = "another tile is faster by the model of the device"
    assert sorted(why for _, why in listed) == ["", *[slower] * 4]
    assert log("on", "132", "4800")[1] == [], "measured"
