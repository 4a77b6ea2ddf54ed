"""The benchmark of adapters that come, go and change: small sizes on a CPU, and its picture."""

import pytest
import torch

from benchmarks import tables
from benchmarks.churn import arrivals
from benchmarks.churn.__main__ import main
from benchmarks.churn.decoder import VOCAB, Decoder, factors, new_pool
from benchmarks.engines.engine_model import PRESETS
from moelora.__main__ import main as moelora
from moelora.bench import results

SMALL = "--preset micro --layers 2 --slots 2 --adapters 4 --ranks 2,4 --rows 3 --prompt 6 --new 3"
SMALL += " --requests 10 --rate 200 --update-layers 2 --update-rank 4 --updates 2 --device cpu"


def test_cases_tables_and_a_picture(tmp_path, monkeypatch, capsys):
    out = tmp_path / "benchmarks/results/h100-churn.json"
    assert main([*SMALL.split(), "--out", str(out)]) == 0
    _, cases = results.read(out)
    first, ahead, blocking = (case for case in cases if case["topic"] == "arrivals")
    assert [c["policy"] for c in (first, ahead, blocking)] == [*arrivals.POLICIES]
    assert (first["slots"], ahead["slots"], first["absent"]) == (4, 2, 0)
    assert first["ttft_ms_ratio"] == first["tok_s_ratio"] == 1
    for case in (first, ahead, blocking):
        assert len(case["waits_ms"]) == 10 and case["ttft_ms"] <= case["ttft_p95_ms"]
    updates = [case for case in cases if case["topic"] == "updates"]
    wanted = [(w, layout) for layout in ("stacked", "peft") for w in ("idle", "under load")]
    assert [(c["what"], c["layout"]) for c in updates] == wanted
    assert all(c["low"] <= c["ms"] <= c["high"] for c in updates)
    assert [bool(c["step_ms"]) for c in updates] == [False, True] * 2
    text = capsys.readouterr().out
    assert text.count(" tokens/s ") == 3 and text.count("update ") == 4

    picture = tmp_path / "arrivals.svg"
    pytest.importorskip("matplotlib")
    words = ["bench", "plot", str(out), "--picture", "arrivals", "--out", str(picture)]
    assert moelora(words) == 0 and "brought ahead (2 slots)" in picture.read_text()
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    assert "| ahead | 2 | 4 |" in tables.section("arrivals")
    assert "| 4 | under load | peft | 2 |" in tables.section("updates")


def test_bad_options(capsys):
    for words, why in (
        (["--policies", "never"], "--topics or --policies has ['never']"),
        (["--slots", "9", "--adapters", "8"], "wanted two --ranks, and at least as many"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert why in capsys.readouterr().err


def test_a_file_without_arrivals_is_refused(tmp_path, capsys):
    out = tmp_path / "other.json"
    results.write(out, [{"topic": "updates"}])
    assert moelora(["bench", "plot", str(out), "--picture", "arrivals"]) == 2
    assert "has no case of arrivals" in capsys.readouterr().err


@torch.no_grad()
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch():
    shape = PRESETS["micro"]
    pool = new_pool(shape, 2, 2, 4, "cpu", host=3)
    for seed, name in enumerate("abc"):
        state, config = factors(pool, 4, seed)
        state = {key: 20 * t for key, t in state.items()}  # or all generate the same
        pool.register(name, state, config=config)
    decoder = Decoder(shape, 2, 3, 16, "cpu")
    decoder.use(pool)
    made = arrivals.requests(6, None, list("abc"), 5, 4, VOCAB)

    def replies(policy, batches):
        found = {}
        for batch in batches:
            loop = arrivals.Loop(decoder, pool, policy)
            step = loop.step

            def watched(loop=loop, step=step):
                running = [(request, row) for row, request in enumerate(loop.rows) if request]
                for request, row in running:
                    found.setdefault(id(request), []).append(int(decoder.tokens[row]))
                step()

            loop.step = watched
            loop.run(batch)
        return [found[id(request)] for request in made]

    alone = replies("blocking", [[request] for request in made])
    assert all(len(reply) == 3 for reply in alone), "and one that follows the last step"
    assert len({tuple(reply) for reply in alone}) > 3
    assert replies("ahead", [made]) == alone
    assert replies("blocking", [made]) == alone
