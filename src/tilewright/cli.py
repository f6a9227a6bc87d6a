"""The `tilewright` command. Each subcommand imports what it needs when it runs: --help is fast."""

import argparse
import errno
import json
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from tilewright import __version__, config
from tilewright.types import RequestError

# What writing to a full disk, or to one that fails, raises; files that are opened by name have errors of their own.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
INTERRUPTED = 130  # the exit status shells give a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of `tilewright ARGUMENTS`."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error can be told: Python's own flush at exit prints a traceback
        return status
    except (config.ConfigError, RequestError) as error:
        print(f"tilewright: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        from tilewright.terminal_chat import discard_output

        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            discard_output()
            return 0  # as `| head` does
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        discard_output()
        print(f"tilewright: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewright",
        description="Runs and serves multimodal models on CPUs.",
        epilog="Each command has its own help: tilewright info --help",
    )
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_chat(commands)
    _add_image(commands)
    _add_video(commands)
    _add_serve(commands)
    _add_batch(commands)
    _add_cache(commands)
    _add_info(commands)
    _add_bench(commands)
    _add_eval(commands)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import demo

    demo.add_arguments(commands)


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import terminal_chat as chat

    chat.add_arguments(commands)


def _add_image(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import image_command

    image_command.add_arguments(commands)


def _add_video(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import video_command

    video_command.add_arguments(commands)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import serve

    serve.add_arguments(commands)


def _add_batch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.batch import command

    command.add_arguments(commands)


def _add_cache(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright import pack_cache

    pack_cache.add_arguments(commands)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.bench import kernels, models, pictures
    from tilewright.bench.serve import command as serve

    parser = commands.add_parser(
        "bench",
        help="measure a model, a server, or the kernels",
        description="Measures a model at decoding, prefill, pictures and many requests at once, a model that makes "
        "pictures or videos, an OpenAI-compatible server, or each kernel.",
        epilog="Each has its own help: tilewright bench decode --help",
    )
    what = parser.add_subparsers(metavar="WHAT", required=True)
    models.add_arguments(what)
    pictures.add_arguments(what)
    serve.add_arguments(what)
    kernels.add_arguments(what)


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.evaluate import command

    command.add_arguments(commands)


def _add_info(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "info",
        help="show this machine and the kernels it uses, or a model's weights",
        description="Prints the CPU, its ISA levels, memory and caches, and the kernel each op runs; of a MODEL the "
        "formats its weights are stored in and their bytes.",
        epilog="""examples:
  tilewright info                            show this machine
  tilewright info --measure                  and measure its limits
  tilewright info --json > machine.json      the same as JSON
  tilewright info ./Qwen3-8B-AWQ             show the formats of a model's weights
  tilewright info ./Qwen3-8B --load --quantize int4   load it and show what its memory goes to
  TILEWRIGHT_MAX_ISA=scalar tilewright info  as a machine without vector instructions""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder, a GGUF file or a hub id")
    parser.add_argument(
        "--load", action="store_true", help="load MODEL, answer a short prompt and show what the memory goes to"
    )
    parser.add_argument("--quantize", help="with --load: as for serve")
    parser.add_argument("--mmproj", metavar="FILE|none", help="as for serve")
    parser.add_argument("--kv-memory", metavar="SIZE", help="with --load: as for serve")
    parser.add_argument("--measure", action="store_true", help="measure read bandwidth and multiply peaks")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long --measure takes (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_info)


def _run_info(options: argparse.Namespace) -> int:
    if options.load:
        return _run_memory_info(options)
    if options.quantize is not None or options.kv_memory is not None:
        print("tilewright info: --quantize and --kv-memory say how a model is loaded: give --load too", file=sys.stderr)
        return 2
    if options.model is not None:
        return _run_model_info(options.model, options.mmproj, options.json)
    from tilewright import machine

    described = machine.describe()
    measured = machine.measure(options.seconds) if options.measure else None
    if options.json:
        print(json.dumps(machine.as_dict(described, measured), indent=2))
    else:
        print(machine.as_text(described, measured))
    return 0


def _run_memory_info(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from tilewright.engine.engine import Engine
    from tilewright.types import RequestError
    from tilewright.weights.checkpoint import CheckpointError

    try:
        engine = Engine(options.model, quantize=options.quantize, mmproj=options.mmproj, kv_memory=options.kv_memory)
    except (CheckpointError, RequestError) as error:
        print(f"tilewright info: {error}", file=sys.stderr)
        return 2
    with engine:
        engine.generate("Hello", max_tokens=4)
        memory, packed_as = engine.memory(), engine.loaded.report.packed_as
    if options.json:
        print(json.dumps(asdict(memory) | {"other_bytes": memory.other_bytes}, indent=2))
    else:
        print(f"{packed_as}\n{memory.as_text()}")
    return 0


def _run_model_info(model: str, mmproj: str | None, as_json: bool) -> int:
    from dataclasses import asdict

    from tilewright.weights.checkpoint import CheckpointError, open_checkpoint
    from tilewright.weights.summary import stored_formats

    try:
        checkpoint = open_checkpoint(model, mmproj)
    except CheckpointError as error:
        print(f"tilewright info: {error}", file=sys.stderr)
        return 2
    formats = stored_formats(checkpoint)
    if as_json:
        print(json.dumps({"path": str(checkpoint.path), "weights": [asdict(item) for item in formats]}, indent=2))
        return 0
    print(f"{checkpoint.path}: {sum(item.size_bytes for item in formats) / 1e9:.3f} GB of weights")
    for item in formats:
        print(f"{item.name:28} {item.num_tensors:6} tensors {item.size_bytes / 1e9:9.3f} GB")
    return 0
