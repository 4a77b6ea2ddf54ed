"""Makes the commit and the tag of a release; the tag publishes it (.github/workflows/release.yml).

    python release/prepare.py 0.1.0

Writes the version into csrc/moelora.h and CITATION.cff, and version and date over what CHANGELOG.md
has under "Unreleased". Refuses, before anything is written: changes that are not committed, a
version that is not newer than all tags, and a changelog without that heading.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# (file, what stands there, what the release writes)
PLACES = [
    (
        "csrc/moelora.h",
        r"(?m)^#define MOELORA_VERSION .*$",
        '#define MOELORA_VERSION "{version}"',
    ),
    ("CITATION.cff", r"(?m)^version: .*$", "version: {version}"),
    ("CHANGELOG.md", r"(?m)^## Unreleased\b.*$", "## {version} ({date})"),
]


def git(*words, root=ROOT):
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def numbers(version):
    """Refuses what is no X.Y.Z."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"the version is {version!r}, wanted three numbers such as 0.1.0")
    return tuple(map(int, version.split(".")))


def contents(version, date, root=ROOT):
    """The new text of each file."""
    texts = {}
    for name, pattern, line in PLACES:
        text = (root / name).read_text()
        texts[name], count = re.subn(pattern, line.format(version=version, date=date), text)
        if count != 1:
            raise ValueError(f"{name} has {count} lines of {pattern}, wanted one")
    return texts


def prepare(version, root=ROOT):
    """The tag."""
    newest = numbers(version)
    if changed := git("status", "--porcelain", root=root):
        raise ValueError(f"there are changes that are not committed:\n{changed}")
    tags = [tag[1:] for tag in git("tag", "--list", "v*.*.*", root=root).split()]
    if late := [tag for tag in tags if numbers(tag) >= newest]:
        raise ValueError(f"the version is {version}, there are releases {', '.join(late)}")
    texts = contents(version, datetime.date.today(), root)
    for name, text in texts.items():
        (root / name).write_text(text)
    git("commit", "--quiet", "--all", "--message", f"release: moelora {version}", root=root)
    git("tag", "--annotate", f"v{version}", "--message", f"moelora {version}", root=root)
    return f"v{version}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="three numbers, such as 0.1.0")
    args = parser.parse_args(argv)
    try:
        tag = prepare(args.version)
    except ValueError as error:
        print(f"release/prepare.py: {error}", file=sys.stderr)
        return 1
    print(f"{tag} is tagged here. To publish it: git push origin HEAD {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
