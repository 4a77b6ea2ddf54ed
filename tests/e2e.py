"""What the tests of both end-to-end benchmarks pretend and read."""

MAKE_MODEL = """\
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True)
adapters = [str(out / f"lora{i}-r{r}") for i, r in enumerate((16, 16, 64, 64), 1)]
manifest = {"base": str(out / "base"), "adapters": adapters, "vocab": 100, "shape": {}}
(out / "manifest.json").write_text(json.dumps(manifest))
"""


def topics(written, topic):
    return [row for row in written["cases"] if row["topic"] == topic]
