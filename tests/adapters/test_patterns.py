"""Keys of rank_pattern and alpha_pattern: PEFT's matches, in bounded time."""

import json
import os
import subprocess
import sys

import pytest
import torch
from adapter_cases import CONFIG, make_pool, per_expert, write
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora.adapters import patterns
from moelora.adapters.patterns import MAX_DEPTH, MAX_LENGTH, MAX_STEPS, Patterns

PATHS = [
    *(
        f"model.layers.{n}.mlp.experts.{e}.{w}"
        for n in (0, 12)
        for e in (1, 13)
        for w in ("w1", "up_proj")
    ),
    *("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.block_sparse_moe.experts.1.w2"),
    *("a", "ab.a", "x..y", ".", "", "é.٣_"),
]
WRITTEN = [  # as found in configurations and in PEFT's documentation
    "down_proj",
    "experts.down_proj",
    "model.layers.0.mlp.experts.1.up_proj",
    r"layers\.0\.mlp\.experts\.gate_up_proj",
    r"^model.layers.0.mlp.experts.1.w1",
    r"model\.layers\.(0|1[0-2])\..*",
    r".*\.experts\.\d+\.(gate|up)_proj$",
    r"block_sparse_moe\.experts\.\d+\.w[13]",
    r"(?:layers\.\d{1,2}\.)?mlp.+",
    r"experts\.[^.]+?\.\w+",
    "",
]
TOKENS = [
    *("a", "b", "x", "1", "w", "up", "_proj", "experts", "layers", "model", "mlp", ".", r"\."),
    *(r"\d", r"\w", r"\D", r"\S", "[0-9]", "[^.]", "[a-z_]", "[1-3x]", "[^a-]", r"[\d.]", "[w|]"),
    *("(", ")", "|", "(?:", "?", "*", "+", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "^", "$", ".*"),
]


def in_peft(keys, path):
    return pytest.importorskip("peft.utils.other").get_pattern_key(keys, path)


def assert_same(keys, path):
    """The first key that PEFT finds; PEFT answers with the path where there is none."""
    wanted = in_peft(keys, path)
    assert Patterns({key: key for key in keys}).find(path, path) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_patterns_in_use(path):
    for start in range(len(WRITTEN)):
        assert_same(WRITTEN[start:] + WRITTEN[:start], path)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(st.sampled_from(TOKENS), max_size=8).map("".join), min_size=1, max_size=3))
def test_drawn_patterns(keys):
    keys = list(dict.fromkeys(keys))
    for key in keys:
        try:
            Patterns({key: key})
        except ValueError as error:
            assert repr(key) in str(error), "a refusal names the key"
            return
    for path in PATHS:
        assert_same(keys, path)


@pytest.mark.parametrize(
    ("key", "rest"),
    [
        ("(a+)+$", "+$"),
        (r"(.*\.)*x", "*x"),
        ("(ab){2}", "{2}"),
        ("(a?)*", "*"),
        ("a**", "**"),
        ("a*+", "*+"),
        ("a{2}{3}", "{2}{3}"),
        ("(?i)a", "?i)a"),
        ("(?=a)", "?=a)"),
        ("(?P<n>a)", "?P<n>a)"),
        (r"(a)\1", r"\1"),
        (r"\bx", r"\bx"),
        ("a\\", "\\"),
        ("(", "its end"),
        ("a)", ")"),
        ("[a", "[a"),
        ("[]", "[]"),
        ("[[a]", "[[a]"),
        ("[a--b]", "[a--b]"),
        ("x[b-a]", "its end"),
        ("*a", "*a"),
        ("^*", "*"),
        ("a{2,1}", "a{2,1}"),
        ("a{,}", "{,}"),
        ("(" * 9 + "a" + ")" * 9, "(a)"),
    ],
)
def test_what_is_refused_by_name(key, rest):
    with pytest.raises(ValueError, match="is not understood from character") as error:
        Patterns({"a": 1, key: 2})
    assert f"key {key!r}" in str(error.value)
    assert f", {rest!r}"[:-1] in str(error.value)


def test_keys_that_are_too_long():
    with pytest.raises(ValueError, match=f"has {MAX_LENGTH + 1} characters"):
        Patterns({"a": 1, "a" * (MAX_LENGTH + 1): 2})
    assert Patterns({"(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH: 2}).find("x.a", 1) == 2


@pytest.mark.parametrize(
    "keys",
    [
        [rf"experts.{n}\d\d" for n in range(1000)],
        ["." * n for n in range(MAX_LENGTH)],
        [("|" * 1000) + str(n) for n in range(9)],
        [rf"[\w.]{{0,900}}{n}x" for n in range(300)],
        [f".*.*.*.*.*.*.*{n}x" for n in range(300)],
        ["(" * 8 + f"a|{n}b" + ")?" * 8 + "x" for n in range(300)],
    ],
    ids=["many", "lengths", "choices", "counted", "repeated", "nested"],
)
def test_time_is_bounded_for_all_paths_together(monkeypatch, keys):
    """A few paths take thousands of steps each; so do all that a checkpoint may have, together."""
    monkeypatch.setattr(patterns, "MAX_STEPS", MAX_STEPS >> 9)
    some = Patterns({key: n for n, key in enumerate(keys)}, "an_option")
    with pytest.raises(ValueError, match=r"an_option: trying \d+ keys for \d+ paths takes more"):
        for n in range(32):
            some.find(f"model.layers.{n}.mlp.experts.{n}.gate_proj", 0)


def test_keys_that_would_take_long_to_read():
    """A regular expression is compiled for each part."""
    keys = ["".join(f"{chr(0x4E00 + 500 * n + i)}*" for i in range(500)) for n in range(40)]
    with pytest.raises(ValueError, match="40 keys have more than 16384 parts"):
        Patterns(dict.fromkeys(keys, 1))


def test_the_largest_models_fit():
    """A key for every layer, and choices for every path of as many experts as there are."""
    keys = {rf"model\.layers\.{n}\.mlp\.experts\.\d+\.(gate|up)_proj$": n for n in range(48)}
    every = Patterns(keys | {r".*\.experts\.[0-9]+\.down_proj": 48})
    for e in range(128):
        for n in range(0, 48, 47):
            path = f"model.layers.{n}.mlp.experts.{e}"
            assert every.find(f"{path}.up_proj", -1) == n
            assert every.find(f"{path}.down_proj", -1) == 48
    assert every._steps * 24 * 1.5 < MAX_STEPS, "as of all layers, and gate_proj too"


def test_a_key_for_every_expert():
    """As tools write them; each is found among all without trying the others."""
    ranks = {f"layers.{n}.mlp.experts.{e}.up_proj": n + e for n in range(48) for e in range(128)}
    every = Patterns(ranks)
    for path, rank in ranks.items():
        assert every.find(f"model.{path}", -1) == rank
    assert every.find("model.layers.48.mlp.experts.0.up_proj", -1) == -1


CATASTROPHES = [r"(\w+\.?)+#", "(a+)+$", r"(.|\w)*#", r"(\w|.|[a-z])*#", ".*.*.*.*.*.*.*.*#"]


LOAD_ALL = """
import sys, torch
from moelora.adapters import AdapterPool, MoELayer, peek
layers = [MoELayer("model.layers.0.mlp.experts", 4, 16, 24)]
for folder in sys.argv[1:]:
    try:
        peek(folder, layers)
        AdapterPool(layers, 1, 8, dtype=torch.float32).add("a", folder)
    except ValueError as error:
        assert "is not understood" in str(error), error
"""


def test_a_pattern_cannot_stop_the_process(tmp_path):
    """Loaded or refused, in a process of its own, as a match of `re` could not be interrupted."""
    state, _ = per_expert()
    folders = []
    for option, value in (("rank_pattern", 4), ("alpha_pattern", 8)):
        for number, key in enumerate(CATASTROPHES):
            config = CONFIG | {option: {key: value}}
            folders.append(str(write(tmp_path / f"{option}-{number}", state, config)))
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", LOAD_ALL, *folders]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_key_with_a_million_dots():
    """Names of tensors are not trusted, either."""
    key = "model" + ".a" * 1_000_000 + ".lora_A.weight"
    with pytest.raises(
        ValueError, match=r"has 2000019 characters and is not a LoRA factor"
    ) as error:
        make_pool().add("a", {key: torch.zeros(4, 16)}, config=CONFIG)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "option", ["use_dora", "bias", "init_lora_weights", "target_parameters", "r"]
)
def test_deep_values_are_refused_in_short(tmp_path, option):
    folder = write(tmp_path / "a", per_expert()[0])
    for depth in (100, 900, 5000):
        deep = "[" * depth + "1" + "]" * depth
        text = json.dumps(CONFIG)[:-1] + f', "{option}": {deep}}}'
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config.json") as error:
            make_pool().add("a", folder)
        assert len(str(error.value)) < 1000
