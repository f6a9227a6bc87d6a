"""`tilewright chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright import engine_flags
from tilewright.types import Completion, RequestError

if TYPE_CHECKING:
    from tilewright.engine.engine import Engine

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
HELP = """/image FILE   show it a picture with the next message
/video FILE   and a video
/clear        forget the conversation
/help         this
/exit         end; so does Ctrl-D. Ctrl-C stops an answer"""


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `chat`."""
    parser = commands.add_parser(
        "chat",
        help="an answer, or a conversation, in the terminal",
        description="Answers PROMPT on standard output as it is generated; all else goes to standard error. "
        "Without PROMPT, on a terminal: a conversation. Without -m, the model that comes with the package.",
        epilog="""examples:
  tilewright chat "What is on it?" --image shapes.png      the embedded model, which is tiny
  tilewright chat "What is a tile?" -m ./Qwen3-VL-2B-Instruct
  tilewright chat "What is on it?" -m MODEL --image photo.jpg --image other.png
  tilewright chat "What happens here?" -m MODEL --video clip.mp4 --max-tokens 200
  git diff | tilewright chat - -m MODEL --system "Write a commit message."
  tilewright chat -m MODEL --temperature 0                 a conversation; /help says how""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to answer; -: read it from standard input")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    parser.add_argument("--video", action="append", default=[], metavar="FILE", help="a video; may be repeated")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("-q", "--quiet", action="store_true", help="no loading bar, no speeds, no notices")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what is going on")
    group = parser.add_argument_group("sampling", "Where nothing is given, as the checkpoint recommends.")
    group.add_argument("--max-tokens", type=engine_flags.positive, metavar="N", help="tokens of an answer at most")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that make up P together")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the best")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="over 1: what was said gets less likely")
    group.add_argument("--seed", type=int, metavar="N", help="the same answer every time")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    engine_flags.add_arguments(parser, max_sequences=1)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    prompt = options.prompt
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read().strip()
    if prompt == "":
        raise RequestError("the prompt is empty, expected some text")
    media = [_part("image", file) for file in options.image] + [_part("video", file) for file in options.video]
    sampling = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    with engine_flags.open_engine(options, progress=sys.stderr.isatty() and not options.quiet) as engine:
        engine.sampling_params(**sampling)  # refused before anybody types
        conversation = Conversation(engine, sampling, options.system, show_speed=not options.quiet, media=media)
        if prompt is None:
            return converse(conversation, _ask)
        return answer_once(conversation, prompt)


def _part(kind: str, file: str) -> dict[str, str]:
    """A part of a message; RequestError if there is no such file."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise RequestError(f"{kind} {file}: {'it is no file' if path.exists() else 'there is no such file'}")
    return {"type": kind, kind: str(path)}


@dataclass
class Conversation:
    """What was said so far, and what will be shown with the next message."""

    engine: Engine
    sampling: dict[str, Any]
    system: str | None = None
    show_speed: bool = True
    media: list[dict[str, str]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, text: str) -> Completion:
        """The answer to `text` and the waiting media, written to standard output as it comes. Ctrl-C ends it early.

        What cannot be answered is not kept: a RequestError leaves the conversation as it was, without the media.
        """
        media, self.media = self.media, []
        content: Any = [*media, {"type": "text", "text": text}] if media else text
        question = {"role": "user", "content": content}
        system = [{"role": "system", "content": self.system}] if self.system else []
        handle = self.engine.submit_chat([*system, *self.turns, question], **self.sampling)
        try:
            for delta in handle:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.abort()
        except BrokenPipeError:
            handle.abort()
            raise
        (completion,) = handle.result()
        print(flush=True)
        self.turns += [question, {"role": "assistant", "content": completion.text}]
        if self.show_speed:
            print(speeds(completion), file=sys.stderr)
        return completion


def speeds(completion: Completion) -> str:
    """How many tokens, and how fast."""
    count, timings = len(completion.token_ids), completion.timings
    if not count:
        return "0 tokens"
    first_s = timings.first_token_s
    first = f"{first_s:.2f} s" if first_s >= 0.1 else f"{first_s * 1000:.0f} ms"
    parts = [f"{count} token{'s' if count > 1 else ''}", f"TTFT {first}"]
    if count > 1 and timings.total_s > timings.first_token_s:
        parts.append(f"{(count - 1) / (timings.total_s - timings.first_token_s):.1f} tokens/s")
    return ", ".join(parts)


def answer_once(conversation: Conversation, prompt: str) -> int:
    try:
        completion = conversation.answer(prompt)
    except BrokenPipeError:
        forget_reader()
        return 0
    if completion.finish_reason == "abort":
        raise KeyboardInterrupt  # what was said stays on standard output; the exit status tells
    return 0


def forget_reader() -> None:
    """Ends standard output well for a reader that had enough, as `| head` has."""
    # Python writes what is left when it ends, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ask() -> str:
    """A line from the terminal, with the arrow keys and the history of readline where Python has it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it once it is imported
    return input("> ")


def converse(conversation: Conversation, ask: Callable[[], str]) -> int:
    """Answers line by line until `ask` raises EOFError or a line says /exit."""
    print("/help for help, Ctrl-D to end", file=sys.stderr)
    while True:
        try:
            line = ask().strip()
            if line == "/exit":
                return 0
            if line.startswith("/"):
                _obey(conversation, line)
            elif line:
                conversation.answer(line)
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:  # while nothing was being answered: the line is dropped
            print(file=sys.stderr)
        except RequestError as error:
            print(f"tilewright: {error}", file=sys.stderr)


def _obey(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command in ("/image", "/video"):
        conversation.media.append(_part(command[1:], rest.strip().strip("'\"")))
        print(f"{len(conversation.media)} to be shown with the next message", file=sys.stderr)
    elif command == "/clear":
        conversation.turns.clear()
        conversation.media.clear()
        print("forgotten", file=sys.stderr)
    elif command == "/help":
        print(HELP, file=sys.stderr)
    else:
        raise RequestError(f"{command} is no command, expected /image, /video, /clear, /help or /exit")
