"""The examples of the pages and of --help: commands, and blocks of Python."""

import argparse
import re
import shlex

from tilewright import cli

COMMANDS = "demo|chat|image|video|serve|batch|cache|info|bench|eval"
CLIENTS = "clients.md"  # the page whose examples need a server, and the client's package
_INPUTS = ("image", "video", "audio")
_OUTPUTS = ("output", "speak", "json", "plot")


def commands_of(text: str) -> list[str]:
    """Return the commands on lines of their own: indented, or in a block of shell."""
    text = re.sub(r"\\\n\s*", " ", text)
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = re.findall(r"^ {2,}\S.*", text, re.MULTILINE)
    lines = []
    for line in [*indented, *blocks.splitlines()]:
        begins = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:\S+/)?tilewright (?=\S)(?! )(.*)", line)
        within = begins or re.search(rf"(?<![\w`-])tilewright ((?:{COMMANDS})\b.*)", line)
        if within:
            lines.append(_without_comment(within[1]))
    return lines


def _without_comment(line: str) -> str:
    return re.split(r" {2,}| # ", line)[0].strip()


def command_words(line: str) -> list[str]:
    """Return the arguments of a command, as the shell gives them."""
    words = shlex.split(line, comments=True)
    ends = [words.index(word) for word in ("<", ">", ">>", "|", "&&") if word in words]
    return words[: min(ends, default=len(words))]


def parse(line: str) -> argparse.Namespace:
    """Return the options of a command; AssertionError if the program would not take them."""
    try:
        return cli._parser().parse_args(command_words(line))
    except SystemExit as ended:
        raise AssertionError(f"tilewright {line}") from ended


def inputs_of(options: argparse.Namespace) -> set[str]:
    """Return the images, videos and sounds that a command reads."""
    given = [getattr(options, name, None) or [] for name in _INPUTS]
    return {file for files in given for file in ([files] if isinstance(files, str) else files)}


def outputs_of(options: argparse.Namespace) -> set[str]:
    """Return the files that a command writes."""
    return {str(file) for name in _OUTPUTS if (file := getattr(options, name, None)) is not None}


def python_blocks(page) -> list[str]:
    """Return the blocks of Python of a page; those of a client begin with one that all others of it go on from."""
    if page.name != CLIENTS:
        return _python_of(page.read_text())
    blocks = []
    for section in sections(page.read_text()).values():
        own = _python_of(section)
        blocks += [*own[:1], *(own[0] + block for block in own[1:])]
    return blocks


def _python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def sections(text: str) -> dict[str, str]:
    """Return the sections of a page by their headings, those of the second level."""
    found = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def help_texts(parser: argparse.ArgumentParser | None = None) -> dict[str, str]:
    """Return the --help of all commands by their names."""
    parser = parser or cli._parser()
    texts = {f"{parser.prog} --help": parser.format_help()}
    if parser._subparsers is not None:
        for child in parser._subparsers._group_actions[0].choices.values():
            texts |= help_texts(child)
    return texts
