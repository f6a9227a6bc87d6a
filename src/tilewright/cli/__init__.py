"""The `tilewright` command. Each subcommand imports its modules when it runs, so that --help is fast."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tilewright import __version__

INTERRUPTED = 130  # shells' exit status of a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `tilewright ARGUMENTS` and return the exit status."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(arguments: Sequence[str] | None) -> int:
    # Imported here, like each command's modules, so that Ctrl-C while modules load shows no traceback.
    from tilewright.cli.streams import READER_LEFT, OutputError, guarded
    from tilewright.config import ConfigError
    from tilewright.host.files import CheckpointError
    from tilewright.host.memory import explained_shortage
    from tilewright.types import RequestError

    try:
        with guarded():
            options = _parser().parse_args(arguments)
            with explained_shortage("stopped"):
                return options.run(options)
    except OutputError as error:
        if error.exit_status != READER_LEFT:
            _print_error(error)
        return error.exit_status
    except (ConfigError, RequestError, CheckpointError) as error:
        _print_error(error)
        return 2


def _print_error(error: Exception) -> None:
    # Standard error may be full or closed.
    with contextlib.suppress(OSError):
        print(f"tilewright: {error}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest flag, command or choice, and show the usage of the command at fault."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        from tilewright.types import did_you_mean

        words = sys.argv[1:] if args is None else list(args)
        if (flag := self._unknown_flag(words)) is not None:
            self.error(f"there is no flag {flag}{did_you_mean(flag, self._option_string_actions)}")
        options, others = super().parse_known_args(words, namespace)
        if others:
            self.error(f"unexpected argument {others[0]!r}: a text with spaces needs quotes")
        return options, others

    def _unknown_flag(self, words: Sequence[str]) -> str | None:
        """Return the first unknown flag, which argparse would report only after missing arguments."""
        for word in words:
            flag = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return None  # no flags follow, or only flags of another parser
            is_flag = flag.startswith("--") and " " not in flag
            if is_flag and not any(known.startswith(flag) for known in self._option_string_actions):
                return flag
        return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from tilewright.types import did_you_mean

            if action.choices is not None:
                error.message += did_you_mean(str(value), map(str, action.choices))
            raise

    def error(self, message: str) -> NoReturn:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [], None)
        usage = formatter.format_help().rstrip().replace(self.prog, f"{self.prog} [OPTION ...]", 1)
        self.exit(2, f"{usage}\n{self.prog}: {message}\nAll options: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
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
    from tilewright.cli import demo

    demo.add_arguments(commands)


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import chat

    chat.add_arguments(commands)


def _add_image(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import image

    image.add_arguments(commands)


def _add_video(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import video

    video.add_arguments(commands)


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import serve

    serve.add_arguments(commands)


def _add_batch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import batch

    batch.add_arguments(commands)


def _add_cache(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli import cache

    cache.add_arguments(commands)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.bench import diffusion, kernels, models
    from tilewright.bench.serve import command as serve

    parser = commands.add_parser(
        "bench",
        help="measure a model, a server, or the kernels",
        description="Measures a model at decoding, prefill, images and many requests at once, a model that makes "
        "images or videos, an OpenAI-compatible server, or each kernel.",
        epilog="Each has its own help: tilewright bench decode --help",
    )
    what = parser.add_subparsers(metavar="WHAT", required=True)
    models.add_arguments(what)
    diffusion.add_arguments(what)
    serve.add_arguments(what)
    kernels.add_arguments(what)


def _add_eval(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.cli.eval import add_arguments

    add_arguments(commands)


def _add_info(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tilewright.flags import engine as engine_flags

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
    engine_flags.add_model_argument(parser, "a folder, a GGUF file or a hub id", is_positional=True)
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
    from tilewright.flags import engine as engine_flags
    from tilewright.types import RequestError

    engine_flags.check_model(options.model, options.mmproj)
    if options.load:
        return _run_memory_info(options)
    if options.quantize is not None or options.kv_memory is not None:
        raise RequestError("--quantize and --kv-memory say how a model is loaded: give --load too")
    if options.model is not None:
        return _run_model_info(options.model, options.mmproj, options.json)
    from tilewright.engine.measure import machine

    described = machine.describe()
    measured = machine.measure(options.seconds) if options.measure else None
    if options.json:
        print(json.dumps(machine.as_dict(described, measured), indent=2))
    else:
        print(machine.as_text(described, measured))
    return 0


def _run_memory_info(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from tilewright.flags import engine as engine_flags

    given = {name: getattr(options, name) for name in ("quantize", "mmproj", "kv_memory")}
    with engine_flags.make_engine(model=options.model, **given) as engine:
        engine.generate("Hello", max_tokens=4)
        memory, packed_as = engine.memory(), engine.loaded.report.packed_as
    if options.json:
        print(json.dumps(asdict(memory) | {"other_bytes": memory.other_bytes}, indent=2))
    else:
        print(f"{packed_as}\n{memory.as_text()}")
    return 0


def _run_model_info(model: str, mmproj: str | None, as_json: bool) -> int:
    from dataclasses import asdict

    from tilewright.weights.checkpoint import open_checkpoint
    from tilewright.weights.values import stored_formats

    checkpoint = open_checkpoint(model, mmproj)
    formats = stored_formats(checkpoint)
    if as_json:
        print(json.dumps({"path": str(checkpoint.path), "weights": [asdict(item) for item in formats]}, indent=2))
        return 0
    print(f"{checkpoint.path}: {sum(item.size_bytes for item in formats) / 1e9:.3f} GB of weights")
    for item in formats:
        print(f"{item.name:28} {item.num_tensors:6} tensors {item.size_bytes / 1e9:9.3f} GB")
    return 0
