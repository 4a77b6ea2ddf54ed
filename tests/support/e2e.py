"""What the tests of both end-to-end benchmarks pretend and read."""

from benchmarks.engines import jobs

MAKE_MODEL = """\
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
adapters = [str(out / f"lora{i}-r{r}") for i, r in enumerate((16, 16, 64, 64), 1)]
manifest = {"base": str(out / "base"), "adapters": adapters, "vocab": 100, "shape": {}}
(out / "manifest.json").write_text(json.dumps(manifest))
"""


def pretend(monkeypatch, folder, reference):
    """Scripts in place of the commands that make models and judge answers."""
    for name, text in {"make_model": MAKE_MODEL, "hold_against": reference}.items():
        script = folder / f"{name}.py"
        script.write_text(text)
        monkeypatch.setattr(jobs.Stages, name, (script,))


def topics(written, topic):
    return [row for row in written["cases"] if row["topic"] == topic]
