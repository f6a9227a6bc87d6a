"""`tilewright cache`: lists or verifies the packed weights on disk."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from tilewright import config

DAMAGED = 1  # exit status


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `cache`."""
    parser = commands.add_parser(
        "cache",
        help="list or verify the packed weights on disk",
        description="Lists the packed weights on disk. With verify, compares the checksums of each file; a "
        "damaged one is removed, and its model is packed again at its next start.",
        epilog="""examples:
  tilewright cache            list files and sizes
  tilewright cache verify     exit status 1 if a file was damaged""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("list", "verify"), default="list", help="default: list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    folder = config.current().cache_dir
    if folder is None:
        print("there is no cache of packed weights: TILEWRIGHT_CACHE_DIR is off")
        return 0
    from tilewright.weights.cache import entries, find_damage

    sizes = {}
    for path in entries(folder):
        with contextlib.suppress(FileNotFoundError):  # a server that starts meanwhile removes old files
            sizes[path] = path.stat().st_size
    print(f"{folder}: {len(sizes)} of packed weights, {sum(sizes.values()) / 1e9:.1f} GB")
    status = 0
    for path, size_bytes in sizes.items():
        damage = find_damage(path) if options.action == "verify" else None
        state = "" if options.action == "list" else "  whole"
        if damage is not None:
            status, state = DAMAGED, f"  {_remove(path)}: {damage}"
        print(f"  {path.name}  {size_bytes / 1e9:.1f} GB{state}")
    return status


def _remove(path: Path) -> str:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"damaged, and not removed ({error.strerror or error})"
    return "removed"
