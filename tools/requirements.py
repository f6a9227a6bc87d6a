"""Prints what the package depends on, and the extras that are named, as lines for `pip install --requirement`.

    python tools/requirements.py test

pip itself lists them only once the package is built; here they are installed meanwhile.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = [requirement for name in sys.argv[1:] for requirement in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
