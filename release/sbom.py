"""The bill of materials of each wheel, CycloneDX 1.6: what it contains and what it asks pip for.

    python release/sbom.py build/release/dist --out build/release/sbom
    python release/sbom.py dist --out sbom --cuda 13.0

Writes OUT/{cuda,cpu}-MACHINE.cdx.json for each wheel, by what it is for. Sources are moelora's own;
a wheel with CUDA kernels also contains NVIDIA's CUDA runtime, of the version that `--cuda`
names, linked statically. torch, numpy and safetensors are not contained: pip chooses them by the
bounds that are in the bill.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from check import kind_of, metadata
from cyclonedx.contrib.hash.factories import HashTypeFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL


def describe(wheel, cuda=None):
    """The bill of one wheel; SystemExit if it contains a CUDA runtime of unknown version."""
    headers = metadata(wheel)
    pages = [line.split(", ") for line in headers.get_all("Project-URL", ())]
    kinds = {"Repository": ExternalReferenceType.VCS, "Issues": ExternalReferenceType.ISSUE_TRACKER}
    root = Component(
        name="moelora",
        version=headers["Version"],
        type=ComponentType.LIBRARY,
        licenses=[LicenseExpression(headers["License-Expression"])],
        purl=PackageURL("pypi", name="moelora", version=headers["Version"]),
        hashes=[
            HashTypeFactory().from_hashlib_alg(
                "sha256", hashlib.sha256(wheel.read_bytes()).hexdigest()
            )
        ],
        external_references=[
            ExternalReference(type=kinds[name], url=XsUri(url))
            for name, url in pages
            if name in kinds
        ],
    )
    bill = Bom()
    bill.metadata.component = root
    parts = []
    if kind_of(wheel).startswith("cuda"):
        if cuda is None:
            raise SystemExit(f"{wheel.name} contains CUDA's runtime: --cuda names its version")
        terms = "NVIDIA CUDA Toolkit End User License Agreement"
        parts.append(
            Component(name="cudart_static", version=cuda, licenses=[DisjunctiveLicense(name=terms)])
        )
    for needed in headers.get_all("Requires-Dist", ()):
        if "extra ==" in needed:
            continue
        name = needed.partition(">")[0].strip()
        parts.append(
            Component(
                name=name,
                purl=PackageURL("pypi", name=name),
                scope=ComponentScope.EXCLUDED,
                properties=[Property(name="Requires-Dist", value=needed)],
            )
        )
    for part in parts:
        bill.components.add(part)
    bill.register_dependency(root, parts)
    return bill


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with wheels")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bills")
    parser.add_argument("--cuda", help="version of the CUDA runtime in wheels that contain one")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(args.folder.glob("*.whl")):
        path = args.out / f"{kind_of(wheel)}.cdx.json"
        bill = describe(wheel, args.cuda)
        writer = make_outputter(bill, OutputFormat.JSON, SchemaVersion.V1_6)
        writer.output_to_file(str(path), allow_overwrite=True, indent=2)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
