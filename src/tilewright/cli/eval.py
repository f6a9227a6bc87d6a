"""`tilewright eval`: its flags, and the run. Imports torch only when it runs, so that --help is fast."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.bench.report import check_outputs, load_average, versions
from tilewright.evaluate.material import FILE_NAME, EvalVariant, parse_variants, read_questions
from tilewright.flags import engine as engine_flags
from tilewright.flags.options import natural, positive
from tilewright.host import files
from tilewright.types import RequestError
from tilewright.weights import embedded

if TYPE_CHECKING:
    from tilewright.evaluate.measure import EvalSettings


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `eval`."""
    parser = commands.add_parser(
        "eval",
        help="measure the quality of weight formats",
        description="Measures how well a model predicts a text and answers questions about images in each format "
        "of its weights, the distance to a reference, speed and memory.",
        epilog=f"""examples:
  tilewright eval -m MODEL --text book.txt --quantize none,int8,int4
  tilewright eval -m MODEL --text book.txt --quantize none,none/int8      keys and values in 8 bits
  tilewright eval -m model.gguf --text book.txt --quantize stored --against f32
  tilewright eval --pictures ./set --quantize none,int4 --json eval.json --plot eval.png

./set has images and {FILE_NAME}, a line of JSON for each question:
  {{"image": "cat.png", "question": "What animal is it?", "answer": ["cat", "a cat"]}}""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # --quantize accepts several formats here
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text, for perplexity and agreement")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help=f"images with questions in {FILE_NAME}")
    parser.add_argument("--against", metavar="FORMAT", help="the reference (default: the first of several formats)")
    _number(parser, "--window", 512, "tokens of the text that the model sees at a time")
    _number(parser, "--stride", 256, "tokens between windows: the number that is scored in each")
    _number(parser, "--max-text-tokens", None, "tokens of the text that are used (default: all)")
    _number(parser, "--max-questions", None, "questions of the set that are used (default: all)")
    _number(parser, "--max-answer-tokens", 64, "most tokens of an answer")
    text = "answers whose speed is measured; 0: none (default 3)"
    parser.add_argument("--speed-rounds", type=natural, default=3, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw quality over speed and memory (needs matplotlib)"
    )
    engine_flags.add_arguments(parser, speculate=0, prefix_cache=False)
    text = "formats of weights, separated by commas: stored (as in the checkpoint), none, bf16, f32, int8, int4, ...; "
    text += "a format of keys and values may follow after a slash: int8/fp8 (default: stored)"
    parser.add_argument("--quantize", default="stored", metavar="FORMATS", help=text)
    parser.set_defaults(run=run)


def _number(parser: argparse.ArgumentParser, flag: str, default: int | None, what: str) -> None:
    help_text = what if default is None else f"{what} (default {default})"
    parser.add_argument(flag, type=positive, default=default, metavar="N", help=help_text)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    engine_flags.check_model(options.model, options.mmproj)
    settings = make_settings(options)
    check_outputs(options)
    from tilewright.evaluate.measure import as_table, measure, write_json, write_plot

    load = load_average()
    given = engine_flags.engine_options(options)
    given.pop("quantize")
    names: list[str] = []

    def open_engine(**format_options: Any) -> Any:
        engine = engine_flags.make_engine(progress=sys.stderr.isatty(), **(given | format_options))
        names.append(engine.loaded.name)
        return engine

    if options.model is None:
        print(f"tilewright: {embedded.notice('-m ./Qwen3-VL-2B-Instruct')}", file=sys.stderr)
    results = measure(settings, open_engine, _bar)
    print(as_table(results))
    if options.json:
        write_json(options.json, results, _about(options, names[0], load))
    if options.plot:
        write_plot(options.plot, results, f"eval, {names[0]}")
    return 0


def make_settings(options: argparse.Namespace) -> EvalSettings:
    """Return the settings that the flags describe; raise RequestError if it is impossible."""
    from tilewright.evaluate.measure import EvalSettings

    if options.text is None and options.pictures is None:
        raise RequestError("nothing to measure: give --text FILE, --pictures DIR or both")
    variants = parse_variants(options.quantize)
    reference = EvalVariant(options.against) if options.against else variants[0] if len(variants) > 1 else None
    questions = read_questions(options.pictures) if options.pictures else []
    return EvalSettings(
        variants,
        reference,
        text=None if options.text is None else _read_text(options.text),
        window=options.window,
        stride=options.stride,
        max_text_tokens=options.max_text_tokens,
        questions=questions[: options.max_questions],
        max_answer_tokens=options.max_answer_tokens,
        speed_rounds=options.speed_rounds,
    )


def _read_text(path: Path) -> str:
    try:
        return files.read_bytes(path, files.MAX_TEXT_BYTES).decode()
    except OSError as error:
        raise RequestError(f"--text is {path}, which cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--text is {path}, which is not UTF-8") from error


def _bar(what: str, count: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=count, desc=what, file=sys.stderr, leave=False, disable=not sys.stderr.isatty())


def _about(options: argparse.Namespace, name: str, load: float) -> dict[str, object]:
    from tilewright.engine.measure import machine

    settings = {
        key: None if (value := getattr(options, key)) is None else str(value) if isinstance(value, Path) else value
        for key in ("text", "pictures", "window", "stride", "max_text_tokens", "max_questions", "max_answer_tokens")
    }
    return {
        "model": name,
        "settings": settings,
        "load_average": load,
        "versions": versions(),
        "machine": machine.as_dict(machine.describe(), None),
    }
