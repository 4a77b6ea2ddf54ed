"""The benchmark of servers under load, on stand-ins of vLLM and SGLang."""

import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("tomllib")

from e2e import runner  # noqa: E402

from benchmarks import tables  # noqa: E402
from benchmarks.engines import jobs  # noqa: E402
from benchmarks.serving import __main__ as serving  # noqa: E402
from benchmarks.serving import sglang_adapters  # noqa: E402


@pytest.fixture
def port():
    """Of the first server: nobody's, so that processes run these tests side by side."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def run(tmp_path, monkeypatch, port):
    """Runs the benchmark with options, and more engines and workloads: what it wrote, its log."""
    run_main = runner(tmp_path, monkeypatch)
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)

    def run(words, code=0, main=serving.main, **more):
        (tmp_path / "more.json").write_text(json.dumps(more))
        words = f"--port {port} --more {tmp_path}/more.json {words}"
        found, written, log = run_main(main, words, "serving")
        assert found == code, log
        return written, log

    return run


@pytest.fixture
def no_model(monkeypatch):
    """For servers without adapters, which do not read a model here."""
    made = {"base": "", "adapters": {}, "weights": True}
    monkeypatch.setattr(serving.Bench, "made", lambda self: made)


def section(name):
    """A table without the spaces that align its columns."""
    return " ".join(tables.section(name).split())


def rows(written, fields="engine workload adapters"):
    return [", ".join(str(row.get(name)) for name in fields.split()) for row in written["cases"]]


def stages(written):
    return [(stage["stage"], stage["end"]) for stage in written["meta"]["stages"]]


def test_each_engine_runs_each_load_alone(run):
    """Rows: all loads with adapters, and without adapters those that show what LoRA costs then."""
    both = "--engines 'vllm + moelora,vllm without LoRA'"
    written, _ = run(f"--model micro --workloads decode_64,saturation {both}")
    found = [
        f"vllm + moelora, {load}" for load in ("decode_64, 4", "saturation, 4", "decode_64, 0")
    ]
    found += [f"vllm without LoRA, {load}" for load in ("decode_64, 0", "saturation, 0")]
    assert rows(written) == found
    first = written["cases"][0]
    assert first["median_ttft_ms"] == 1.235 and "p99_ttft_ms" not in first and first["start_s"] > 0
    assert all("served" not in row for row in written["cases"])
    assert {end for _, end in stages(written)} == {"ok", "stopped"}
    assert "| bf16, micro | decode of 64 | 2,000 | - | **2,000** |" in section("serving_rates")
    assert "| vllm + moelora | saturation | 4 |" in section("serving_all")


def test_servers_of_sglang_started_together_take_turns(run, tmp_path, port):
    """Requests call an adapter `model:adapter`: under another name SGLang runs the base model."""
    words = "--model micro --layers 1 --ranks 4 --workloads warm_up,decode_64 --at-once"
    both = "--engines 'sglang + moelora,sglang without LoRA'"
    written, log = run(f"{words} {both} --server-args --x")
    found = [
        f"sglang {engine}, {load}, {adapters}"
        for load in ("warm_up", "decode_64")
        for engine, adapters in (("+ moelora", 4), ("without LoRA", 0))
    ]
    assert rows(written) == [*found, "sglang + moelora, decode_64, 0"]
    assert "start_s" not in written["cases"][0]
    base = tmp_path / "work/model/base"
    assert f"http://127.0.0.1:{port} ['{base}:a0-r4', '{base}:a1-r4'" in log
    assert f"http://127.0.0.1:{port + 1} None" in log and "'--x']" in log
    assert "'--max-loras-per-batch', '5'" in log, "one slot is the base model's"
    assert "['benchmark_adapters', 'moelora'] ['" in log, "plugins"


def test_sglang_reads_adapters_of_a_model_without_weights():
    load_config = dataclasses.make_dataclass("LoadConfig", ["load_format"])
    adapter = SimpleNamespace(load_config=load_config("dummy"))
    assert sglang_adapters.from_files(lambda a: a.load_config.load_format, adapter) == "auto"


def test_servers_on_gpus_of_their_own(run, no_model):
    """Servers are up together, and are loaded one after the other, as they answer."""
    names = ("vllm without LoRA", "sglang without LoRA")
    written, log = run(f"--gpus 2,5 --engines '{','.join(names)}' --workloads saturation")
    assert sorted(rows(written)) == sorted(f"{name}, saturation, 0" for name in names)
    *loads, first, second = stages(written)
    assert sorted(loads) == sorted((f"load {name}", "ok") for name in names)
    assert [first, second] == [(f"serve {name}", "stopped") for name in names]
    for name, gpu in zip(names, "25", strict=True):
        assert f"==== serve-{name.replace(' ', '-')}\nNone {gpu} [" in log


def test_a_server_that_did_not_answer_is_named(run, no_model):
    engines = {"mute": {"command": ["sleep", "60"]}, "gone": {"command": ["true"]}}
    written, _ = run("--engines mute,gone --start-s 0.5", code=1, engines=engines)
    late = "did not answer within 0.5 s"
    assert stages(written) == [("serve mute", late), ("serve gone", "ended")] and not rows(written)


def terminated(argv):
    """Runs the benchmark in a process, which gets a SIGTERM in its second load: exit status."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.serving", *argv])
    log = pathlib.Path(argv[argv.index("--work") + 1]) / "load-vllm-without-LoRA.log"
    while process.poll() is None and not (log.exists() and log.read_text().count("http") == 2):
        time.sleep(0.1)
    process.terminate()
    return process.wait(60)


def test_a_run_that_is_ended_leaves_its_rows_and_no_server(run, port):
    words = "--model micro --layers 1 --engines 'vllm without LoRA'"
    words += " --workloads decode_64,first_minute"  # of 16 seconds
    written, _ = run(words, 128 + signal.SIGTERM, terminated)
    assert rows(written) == ["vllm without LoRA, decode_64, 0"]
    assert ("serve vllm without LoRA", "stopped") in stages(written)
    running = SimpleNamespace(poll=lambda: None)
    assert not jobs.is_up(f"http://127.0.0.1:{port}/health", running, until=0)


def test_a_server_that_somebody_else_started(run, tmp_path):
    words = "--url http://127.0.0.1:1 --engines my/own --served-model law --lora-modules a,b"
    assert rows(run(f"{words} --workloads saturation")[0]) == ["my/own, saturation, 2"]
    (tmp_path / "work/plugin").rename(tmp_path / "work/notes")
    with pytest.raises(SystemExit, match="would be emptied, and is not of such a run"):
        run(words)
    assert (tmp_path / "work/notes").exists()


def test_more_adapters_than_slots_in_an_engine_of_a_file(run, tmp_path):
    """Experts whose format wants real weights."""
    mine = {"command": serving.ENGINES["vllm"]["command"], "host": ["--host", "{host}"]}
    mine |= {"lora": ["--slots", "{slots}", "{modules}"], "environment": {"SAY": "{rank}"}}
    load = {"zipf": 1, "input": 9, "output": 2, "prompts": 3, "range_ratio": 0.5, "source": "ours"}
    more = {"engines": {"mine": mine}}
    more["workloads"] = {"ours": load, "few": load | {"adapters": 2}}
    pool = "--adapters 8 --max-loras 2 --max-cpu-loras 4 --ranks 4,2 --workloads ours,few"
    written, log = run(f"--model micro --format nvfp4 --engines mine {pool}", **more)
    # The first adapter is named 4 * 8 / 1 times, of two 4 * 2 / 1 times.
    found = rows(written, "adapters max_loras max_cpu_loras seed source duration")
    assert found == ["8, 2, 4, 0, None, 32", "2, 2, 4, 1, None, 8"]
    folder = tmp_path / "work/model/adapters"
    modules = [f"a{i}-r{rank}={folder}/a{i}-r{rank}" for i, rank in enumerate((4, 2) * 4)]
    assert str(["--slots", "2", *modules, "--host", "4"])[1:] in log and "dummy" not in log
    assert "==== serve-mine\n4 " in log
    assert "| NVFP4, micro | ours | 8 | 2 | 1.2 |" in section("serving_adapters")


def test_without_vllm_no_model_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="vLLM is not installed here"):
        serving.main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "x.json")])
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model micro --format mxfp4", "micro has no mxfp4"),
        ("--model gpt-oss-20b --format int4", "gpt-oss-20b has only mxfp4"),
        ("--adapters 4 --max-loras 8", "1 <= --max-loras <= --max-cpu-loras"),
        ("--engines vllm,vllm", "of which two would have the same log"),
        ("--at-once --gpus 0,1", "--at-once has all servers on the same GPUs"),
        ("--workloads none", "--workloads has ['none'], known are first_minute"),
        ("--url http://127.0.0.1:1", "the server's --served-model"),
        ("--more nowhere.json", "--more nowhere.json: "),
        ({"workloads": {"mine": {"zipff": 1}}}, "workload mine has ['zipff'], known are adapters"),
        ({"engines": {"mine": {"lora": []}}}, "engines ['mine'] have no command"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(tmp_path, capsys, words, message):
    if isinstance(words, dict):
        (tmp_path / "more.json").write_text(json.dumps(words))
        words = f"--more {tmp_path}/more.json"
    work = tmp_path / "work"
    with pytest.raises(SystemExit):
        serving.main([*words.split(), "--work", str(work), "--out", str(tmp_path / "x.json")])
    assert message in capsys.readouterr().err and not work.exists()
