"""`python -m benchmarks.tables`: prints tables, or updates the pages."""

import argparse

from benchmarks import ROOT
from benchmarks.tables import MADE, PAGES, PICTURES, TABLES, filled, section
from benchmarks.tables.files import path_of, topics


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a table, as pages name it")
    parser.add_argument("--write", action="store_true", help="update all pages instead")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name.partition(" ")[0] not in {*TABLES, *MADE}]:
        parser.error(f"no table is called {' or '.join(unknown)}")
    if args.write:
        for page in PAGES:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
        from moelora.__main__ import main as moelora

        for picture, (topic, more) in PICTURES.items():
            if topic in topics(topic):
                moelora(["bench", "plot", str(path_of(topic)), "--out", picture, *more])
    else:
        print("\n\n".join(map(section, args.names)))


if __name__ == "__main__":
    main()
