"""`python -m benchmarks.tables`: prints tables, or updates the pages."""

import sys

from benchmarks import ROOT
from benchmarks.tables import COMPUTED, MADE, PAGES, PICTURES, filled, section
from benchmarks.tables.columns import TABLES
from benchmarks.tables.files import path_of


def main():
    if sys.argv[1:] == ["--write"]:
        for page in PAGES:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
        from moelora.__main__ import main as moelora

        for picture, (topic, more) in PICTURES.items():
            if path_of(topic):
                moelora(["bench", "plot", str(path_of(topic)), "--out", picture, *more])
    else:
        print("\n\n".join(map(section, sys.argv[1:] or (*TABLES, *MADE, *COMPUTED))))


if __name__ == "__main__":
    main()
