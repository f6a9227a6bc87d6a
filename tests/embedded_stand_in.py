"""A distribution of embedded models with random weights, or with none, for processes of their own."""

import os
from pathlib import Path

from tilewright.weights import embedded

ENTRY_POINTS = "[tilewright.embedded]\ntiny = tilewright_tiny:FOLDER\n"


def write_distribution(target: Path, model: Path | None) -> Path:
    """A folder for PYTHONPATH where `model` is the embedded one; the one that draws stays as it is installed."""
    package = target / "tilewright_tiny"
    package.mkdir()
    (package / "__init__.py").write_text("from pathlib import Path\n\nFOLDER = Path(__file__).parent\n")
    if model is not None:
        (package / "tiny_vl").symlink_to(model)
    (package / "tiny_draw").symlink_to(embedded.path("tiny_draw"))
    # Of two distributions of one name, the one that comes first on the path counts.
    information = target / "tilewright_tiny-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tilewright-tiny\nVersion: 0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return target


def environment(path: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that imports from there and computes with one thread."""
    paths = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ, "PYTHONPATH": paths, "TILEWRIGHT_NUM_THREADS": "1", "TILEWRIGHT_CACHE_DIR": "off", **variables
    }  # fmt: skip
