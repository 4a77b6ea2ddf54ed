"""Keys of rank_pattern and alpha_pattern: PEFT's matches, in bounded time."""

import json

import pytest
import torch
from adapter_cases import CONFIG, make_pool, per_expert, write
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora.adapters import patterns
from moelora.adapters.patterns import MAX_LENGTH, Patterns

PATHS = [
    *(f"model.layers.{n}.mlp.experts.{e}.w1" for n in (0, 12) for e in (1, 13)),
    *(f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in (0, 12) for e in (1, 13)),
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
    r"(?!.*experts).*|(\w+\.)*w1",
    "",
]
TOKENS = [
    *("a", "b", "x", "1", "w", "up", "_proj", "experts", "layers", "model", "mlp", ".", r"\."),
    *(r"\d", r"\w", r"\D", r"\S", "[0-9]", "[^.]", "[a-z_]", "[1-3x]", "[^a-]", r"[\d.]", "[w|]"),
    *("(", ")", "|", "(?:", "?", "*", "+", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "^", "$", ".*"),
    *(r"\b", "(?=", "(?!", "(?<=", r"\2", "(?P<n>", "{}", "{1", "[[a]", "{e<=1}"),
    *("[[:alpha:]]", r"\p{L}"),
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
    "key",
    [
        *("a**", "a{2}{3}", "(?i)a", "a\\", "(", "a)", "[a", "[]", "x[b-a]", "*a", "a{2,1}"),
        *("a{e<=1}", "[[:alpha:]]", r"\p{L}", "(?R)", "(" * 500 + "a" + ")" * 500),
    ],
)
def test_what_is_refused_by_name(key):
    with pytest.raises(ValueError, match="is no regular expression: .") as error:
        Patterns({"a": 1, key: 2})
    assert f"key {key!r:.80}" in str(error.value)


def test_keys_that_are_too_long():
    with pytest.raises(ValueError, match=f"has {MAX_LENGTH + 1} characters"):
        Patterns({"a": 1, "a" * (MAX_LENGTH + 1): 2})


@pytest.mark.parametrize(
    "keys",
    [
        [r"(.|\w)*[#!]"],
        [r"(?:.{0,60000}){0,60000}\d#?"],
        [rf"([\w.]+[\w.]+)+\d{n}" for n in range(1000)],
        [("|" * 1000) + str(n) for n in range(1000)],
        ["." * n for n in range(MAX_LENGTH)],
        [r"(\w+\.?)+#", "(a+)+$", r"(\w|.|[a-z])*#", ".*.*.*.*.*.*.*.*#"],
    ],
    ids=["choices", "counted", "many", "long", "lengths", "nested"],
)
def test_time_is_bounded_for_all_paths_together(monkeypatch, keys):
    """On any machine: so many paths take more than a tenth of a second."""
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    message = r"an_option: trying \d+ keys for \d+ paths takes more than 0.1 seconds"
    with pytest.raises(ValueError, match=message):
        some = Patterns({key: n for n, key in enumerate(keys)}, "an_option")
        for n in range(100_000):
            some.find(f"model.layers.{n}.mlp.experts.{n}.gate_proj", 0)


def test_the_largest_models_fit():
    """A key for every layer, and choices for every path of as many experts as there are."""
    keys = {rf"model\.layers\.{n}\.mlp\.experts\.\d+\.(gate|up)_proj$": n for n in range(48)}
    every = Patterns(keys | {r".*\.experts\.[0-9]+\.down_proj": 48})
    for e in range(128):
        for n in range(0, 48, 47):
            path = f"model.layers.{n}.mlp.experts.{e}"
            assert every.find(f"{path}.up_proj", -1) == n
            assert every.find(f"{path}.down_proj", -1) == 48


def test_a_key_for_every_expert():
    """As tools write them; each is found among all without trying the others."""
    ranks = {f"layers.{n}.mlp.experts.{e}.up_proj": n + e for n in range(48) for e in range(128)}
    every = Patterns(ranks)
    for path, rank in ranks.items():
        assert every.find(f"model.{path}", -1) == rank
    assert every.find("model.layers.48.mlp.experts.0.up_proj", -1) == -1


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
