"""What the repository has and a source distribution leaves out (MANIFEST.in)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = r"(benchmarks/results|examples/demo_model|examples/demo_adapters)/.*|.*\.png"

needs_checkout = pytest.mark.skipif(
    not (ROOT / "examples/demo_model").is_dir(),
    reason="a source distribution has neither result files nor the demo's model nor pictures",
)
