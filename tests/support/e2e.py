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


QUANTIZE = """\
import pathlib, shutil, sys
model, out = (pathlib.Path(sys.argv[sys.argv.index(w) + 1]) for w in ("--model", "--out"))
for name in [out.name] if "--only-quantized" in sys.argv else [out.name, f"{out.name}-dense"]:
    shutil.copytree(model, out.with_name(name), dirs_exist_ok=True)
"""


def pretend(monkeypatch, folder, reference):
    """Scripts in place of the commands that make models and judge answers."""
    scripts = {"make_model": MAKE_MODEL, "quantize_model": QUANTIZE, "hold_against": reference}
    for name, text in scripts.items():
        script = folder / f"{name}.py"
        script.write_text(text)
        monkeypatch.setattr(jobs.Stages, name, (script,))


def topics(written, topic):
    return [row for row in written["cases"] if row["topic"] == topic]
