"""Cards that moelora was not measured on: layers run where they are faster, and nobody loses."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Spec
from conftest import needs_gpu
from torch import nn
from vllm_hooks import Deltas
from vllm_layer import HERE, Layer, load
from vllm_quantized import QuantizedLayer

pytest_plugins = ["vllm_fixtures"]

SPEC = Spec(tokens=9, mix="many", ranks=(8, 8, 8))
QUANTIZED = Spec(tokens=9, hidden=64, inter=96, dtype=torch.bfloat16, mix="absent")
SIZES = (2, 8)
CARD = "NVIDIA B200"


def machine(monkeypatch, card=CARD):
    """A GPU as torch describes it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def forget(race):
    """What a process looks up once."""
    race._card.cache_clear()
    race.wanted.cache_clear()


@pytest.fixture
def race(vllm, monkeypatch, tmp_path):
    """The module, with a pretended clock: `race.slower` has the tokens at which moelora is slower,
    `race.timed` counts what was timed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine(monkeypatch)
    race = load(f"{HERE}.race")
    forget(race)
    race._tables.clear()
    monkeypatch.setattr(race, "_spent", 0.0)
    monkeypatch.setattr(race, "SIZES", SIZES)
    race.slower, race.timed = (), 0
    rows = []

    def measure(run):
        run()
        race.timed += 1
        tokens, side = rows.pop(0)
        return 2.0 if side == "moelora" and tokens in race.slower else 1.0

    def in_order(sides, row=race._row):
        rows[:] = [(race.at, side) for side in ("vLLM", "moelora", "vLLM")]
        return row(sides)

    def noting(of, found, tokens, adapters, sides, run=race.race):
        def at(size, has):
            race.at = size
            return sides(size, has)

        run(of, found, tokens, adapters, at)

    monkeypatch.setattr(race, "measure", measure)
    monkeypatch.setattr(race, "_row", in_order)
    monkeypatch.setattr(race, "race", noting)
    logger = logging.getLogger("vllm.moelora")
    logger.setLevel(logging.INFO)
    vllm.register()
    yield race
    logger.setLevel(logging.NOTSET)
    forget(race)


def new_process(race, monkeypatch):
    race._tables.clear()
    monkeypatch.setattr(race, "measure", None)  # nothing is timed again


def layer(vllm, tokens=9, mix="many"):
    made = Layer(vllm, Spec(tokens=tokens, mix=mix, ranks=(8, 8, 8)).build())
    return made if made.lora is None else made.step()


def is_ours(vllm, made):
    y = made()
    if bool((y == vllm.OWN).all()):
        return False
    made.check(y)
    return True


@pytest.mark.parametrize("slower", [(), (2,), (8,), (2, 8)])
def test_each_number_of_tokens_runs_where_it_is_faster(race, vllm, lines, monkeypatch, slower):
    """The next start reads it from the file."""
    race.slower = slower
    assert is_ours(vllm, layer(vllm, 9)) == (8 not in slower)
    new_process(race, monkeypatch)
    assert is_ours(vllm, layer(vllm, 2)) == (2 not in slower)
    assert is_ours(vllm, layer(vllm, 1)) == (2 not in slower)  # the nearest
    assert is_ours(vllm, layer(vllm, 7)) == (8 not in slower)
    assert race.timed == 3 * len(SIZES) * 2, "with adapters and without"
    told = [line for line in lines if "by tokens" in line]
    assert len(told) == 1 and CARD in told[0] and "MOELORA_VLLM=1 takes" in told[0]
    for tokens in SIZES:
        side = "vLLM (2.00x)" if tokens in slower else "moelora (1.00x)"
        assert f"{tokens} with adapters: {side}" in told[0]


def damaged(path):
    path.write_text(path.read_text()[:-40])


def of_another_card(path):
    content = json.loads(path.read_text())
    content["of"]["card"] = "NVIDIA L4"
    path.write_text(json.dumps(content))


def row(value):
    def change(path):
        content = json.loads(path.read_text())
        content["rows"][0] = value
        path.write_text(json.dumps(content))

    return change


FILES = {
    "damaged": (damaged, "is ignored: JSONDecodeError"),
    "empty": (lambda path: path.write_text(""), "is ignored: JSONDecodeError"),
    "of another card": (of_another_card, "is ignored: it is of card 'NVIDIA L4'"),
    "a list": (lambda path: path.write_text("[]"), "is ignored: ValueError: it is no table"),
    "huge": (lambda path: path.write_text("[" * 100_000), "is ignored: ValueError: it is no table"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xff\xff\xff"), "is ignored: UnicodeDecodeError"),
    "a row of text": (row("text"), "is ignored"),
    "negative": (row([2, False, -1.0, 1.0]), "a row is not [tokens, adapters, seconds, seconds]"),
    "not a number": (row([2, False, float("nan"), 1.0]), "a row is not [tokens"),
    "a boolean": (row([True, False, 1.0, 1.0]), "a row is not [tokens"),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_not_of_this_is_ignored_with_a_line(race, vllm, lines, file):
    change, words = FILES[file]
    race.slower = (8,)
    is_ours(vllm, layer(vllm))
    (path,) = race.folder().glob("*.json")
    whole = path.read_text()
    change(path)
    race._tables.clear()
    timed = race.timed
    assert not is_ours(vllm, layer(vllm))
    assert race.timed == 2 * timed, "timed again"
    assert sum(words in line and str(path) in line for line in lines) == 1
    assert path.read_text() == whole


def test_a_folder_that_cannot_be_written(race, vllm, lines, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert is_ours(vllm, layer(vllm))
    assert any("is not written, so the next start times layers again" in line for line in lines)


def test_ranks_write_at_once(race):
    """A reader finds a whole table at any time."""
    of = race.identity("unquantized", w13=(1, 2))
    tables = [race.Table({(2, False): (float(n), 1.0)}) for n in range(1, 9)]
    race._write(of, tables[0])

    def write_and_read(n):
        for _ in range(40):
            race._write(of, tables[n])
            assert len(race._read(of).rows) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_and_read, range(8)))
    assert [path.suffix for path in race.folder().iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("card", "env", "races"),
    [
        ("NVIDIA B200", {}, True),
        ("NVIDIA GeForce RTX 5090", {}, True),
        ("NVIDIA B200", {"MOELORA_VLLM": "1"}, False),
        ("NVIDIA H200", {}, False),
        ("NVIDIA H100 80GB HBM3", {}, False),
        ("NVIDIA H200", {"MOELORA_MAX_CC": "80"}, True),
        ("NVIDIA H200", {"MOELORA_MAX_CC": "90"}, False),
        ("NVIDIA H200", {"MOELORA_MAX_CC": "80", "MOELORA_VLLM": "1"}, False),
    ],
)
def test_where_layers_race(race, vllm, monkeypatch, card, env, races):
    machine(monkeypatch, card)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    forget(race)
    race.slower = SIZES
    assert race.wanted() == races
    assert is_ours(vllm, layer(vllm)) != races
    assert bool(race.timed) == races
    assert len([*race.folder().glob("*.json")]) == races


def test_what_could_not_be_timed_stays_with_vllm(race, vllm, lines, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not is_ours(vllm, layer(vllm))
    assert not race.timed
    monkeypatch.setattr(race, "_spent", race.BUDGET)
    assert not is_ours(vllm, layer(vllm)) and not race.timed
    assert any("the time for races is used up" in line for line in lines)


def test_a_side_that_raises_is_named_and_not_tried_again(race, vllm, lines, monkeypatch):

    def fail(run):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(race, "measure", fail)
    made = layer(vllm)
    assert not is_ours(vllm, made) and not is_ours(vllm, made)
    assert any("were not timed at 8 tokens: RuntimeError: an illegal" in line for line in lines)
    assert not [*race.folder().glob("*")]


def test_the_budget_is_what_timing_takes(race, vllm, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(race.time, "monotonic", lambda: next(now))
    is_ours(vllm, layer(vllm))
    assert race.timed == 3 * race.BUDGET, "a second each, of four rows"


@pytest.fixture
def engines_own(vllm):
    """vLLM's side of quantized layers: 16-bit weights for its Triton experts."""

    def process(self, layer):
        moe = self.moe
        for name in [n for n in layer._parameters if n.startswith(("w13_", "w2_"))]:
            del layer._parameters[name]
        hidden, inter = moe.hidden_dim, moe.intermediate_size_per_partition
        layer.w13_weight = nn.Parameter(torch.zeros(moe.num_local_experts, 2 * inter, hidden))
        layer.w2_weight = nn.Parameter(torch.zeros(moe.num_local_experts, hidden, inter))
        place = load("vllm.model_executor.layers.fused_moe.config")
        experts = vllm.TritonExperts(moe, place.biased_moe_quant_config(None, None))
        prepare = vllm.MoEPrepareAndFinalizeNoDPEPModular()
        self.moe_kernel = vllm.FusedMoEKernel(prepare, experts)

    for _, cls in map(vllm.method, ("gptq", "nvfp4_modelopt")):
        vllm.monkeypatch.setattr(cls, "process_weights_after_loading", process)


@pytest.mark.parametrize("slower", [(), (2,), (8,), (2, 8)])
@pytest.mark.parametrize("kind", ["gptq", "nvfp4_modelopt"])
def test_a_quantized_layer_stays_with_vllm_if_it_loses_anywhere(
    engines_own, race, vllm, lines, monkeypatch, kind, slower
):
    """Tiles are for one side only."""
    race.slower = slower
    for process in range(2):
        made = QuantizedLayer(vllm, kind, QUANTIZED)
        ours = type(made.experts).__name__ == "QuantizedExpertsWithLoRA"
        assert ours == (not slower)
        if ours:
            made.check(made())
        if process == 0:
            new_process(race, monkeypatch)
            monkeypatch.setattr(race, "_row", None)


def test_a_format_that_vllm_fails_on_runs_in_moelora(engines_own, race, vllm, lines, monkeypatch):
    place = load(f"{HERE}.methods")

    def fail(process, method, layer, packed, format, run=place._race):
        def process(*_):
            raise RuntimeError("no kernel image is available")

        return run(process, method, layer, packed, format)

    monkeypatch.setattr(place, "_race", fail)
    made = QuantizedLayer(vllm, "gptq", QUANTIZED)
    made.check(made())
    assert any("vLLM's own path fails (RuntimeError: no kernel image" in line for line in lines)


def test_doctor_prints_the_tables(race, vllm):
    race.slower = (8,)
    is_ours(vllm, layer(vllm))
    (line,) = race.report()
    assert "unquantized layers on NVIDIA B200, by tokens: " in line
    assert "2: moelora (1.00x)" in line and "8 with adapters: vLLM (2.00x)" in line
    (path,) = race.folder().glob("*.json")
    damaged(path)
    assert f"{path} is ignored" in race.report()[0]


def test_the_line_is_for_the_log_of_every_start(race, vllm, caplog):
    with caplog.at_level(logging.INFO, "vllm.moelora"):
        is_ours(vllm, layer(vllm))
    assert [r.levelname for r in caplog.records if "by tokens" in r.message] == ["INFO"]


@pytest.mark.parametrize("slower", [(), (8,)])
def test_adapters_of_vllms_layers_race_with_its_kernels(own, race, vllm, slower):
    """The gate's choice is also that of the down projection."""
    race.slower = slower
    made = Deltas(vllm, SPEC.build()).step()
    y = made()
    names = [call.name for call in own.calls]
    assert names.count("add_lora_w2") == bool(slower)
    assert names.count("add_lora_w13") == 3 * len(SIZES) + bool(slower), "and what was timed"
    if not slower:
        made.check(y)


def test_a_layer_that_is_left_has_vllms_own_adapters(own, race, vllm):
    race.slower = SIZES
    made = Deltas(vllm, SPEC.build()).step()
    with load(f"{HERE}.deltas").left():
        made()
    assert [call.name for call in own.calls] == ["add_lora_w13", "add_lora_w2"]
    assert not race.timed


def test_layers_of_data_parallel_ranks_run_in_moelora(engines_own, own, race, vllm, lines):
    """vLLM's kernels leave out adapters that only other ranks' batches have. Quantized layers,
    which are timed before they have adapters, stay with vLLM."""
    race.slower = SIZES
    made = Layer(vllm, SPEC.build(), dp_size=2).step()
    assert is_ours(vllm, made)
    count, rows, columns = made.p.w13.shape
    problem = 9, rows, columns, SPEC.top_k, count, count, None, made.activation
    assert made.experts.workspace_shapes(*problem)[:2] == ((0,), (0,))
    quantized = QuantizedLayer(vllm, "gptq", QUANTIZED, dp_size=2)
    assert type(quantized.experts) is vllm.TritonExperts
    assert any("layers of data-parallel ranks are not timed" in line for line in lines)
    deltas = Deltas(vllm, SPEC.build(), dp_size=2).step()
    deltas.check(deltas())
    assert not own.calls and not race.timed


@pytest.mark.gpu
@needs_gpu
def test_a_call_is_timed_by_the_gpus_clock(vllm):
    """In a graph, whose replays compute what the call does."""
    race = load(f"{HERE}.race")
    x = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    seconds = race.measure(lambda: torch.mm(x, x, out=out))
    assert 0 < seconds < 1
    assert bool((out == 512).all())
