"""`python -m tilewright.bench WHAT`, the same as `tilewright bench WHAT`."""

import argparse
import sys

from tilewright.bench import kernels, models
from tilewright.bench.serve import command as serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewright.bench")
    what = parser.add_subparsers(metavar="WHAT", required=True)
    models.add_arguments(what)
    kernels.add_arguments(what)
    serve.add_arguments(what)
    options = parser.parse_args()
    return options.run(options)


sys.exit(main())
