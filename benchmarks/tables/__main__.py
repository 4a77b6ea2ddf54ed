"""`python -m benchmarks.tables`: prints tables, or updates the pages."""

import sys

from benchmarks import ROOT
from benchmarks.tables import PAGES, PICTURES, filled, section
from benchmarks.tables.files import path_of, topics


def main():
    if sys.argv[1:] == ["--write"]:
        for page in PAGES:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
        from moelora.__main__ import main as moelora

        for picture, (topic, more) in PICTURES.items():
            if topic in topics(topic):
                moelora(["bench", "plot", str(path_of(topic)), "--out", picture, *more])
    else:
        print("\n\n".join(map(section, sys.argv[1:])))


if __name__ == "__main__":
    main()
