"""`python -m tilewright.bench kernels`, the same as `tilewright bench kernels`."""

import argparse
import sys

from tilewright.bench import kernels


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewright.bench")
    kernels.add_arguments(parser.add_subparsers(metavar="COMMAND", required=True))
    options = parser.parse_args()
    return options.run(options)


sys.exit(main())
