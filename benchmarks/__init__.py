"""Commands of a checkout that write benchmarks/results/, `python -m benchmarks.NAME`, or compare
builds (`benchmarks.compare`).

README and docs/ quote their files (`benchmarks.tables`). Users of a wheel have `moelora bench`,
whose cases, shapes, timers and result files these commands share; problems and small models are
those of the tests.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests/support"), str(ROOT / "tests")]
