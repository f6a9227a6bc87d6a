"""Speakers for espeak-ng that nobody else has: files as in its folder of speakers, with values drawn at random.

espeak-ng reads a speaker's file whenever a voice is set, whether or not the file is in its list, which ends at 350. So
one file is enough for any number of speakers: it is written anew for each sentence, in a folder of data of our own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from multiprocessing.util import Finalize
from pathlib import Path
from random import Random

SPEAKERS = Path("voices", "!v")  # in the folder of data
# The synthesiser's own sources of voice, as its files number them.
KLATT = (1, 2, 3, 4, 5, 6)


def random_variant(rng: Random) -> str:
    """The text of a speaker's file.

    Values are around espeak-ng's defaults, and about as far from them as those of the speakers it has. They belong
    together where they do in people: one throat moves all resonances, and a high voice comes from a short one.
    """
    short = rng.gauss(0, 1)
    pitch = round(_within(95 * 1.3 ** (short + rng.gauss(0, 0.7)), 50, 240))
    throat = 1.1 ** (short + rng.gauss(0, 0.7))
    lines = [
        "language variant",
        f"pitch {pitch} {round(pitch * rng.uniform(1.1, 1.7))}",
        *(_formant(rng, number, throat) for number in range(9)),
        f"voicing {_around(rng, 80, 1.8, 25, 230)}",
        f"consonants {_around(rng, 90, 1.7, 30, 220)} {_around(rng, 95, 1.7, 30, 220)}",
        f"flutter {rng.choice((0, 0, 1, 2, 2, 3, 4, 6, 10, 20))}",
        f"roughness {rng.choice((0, 0, 1, 2, 2, 3, 4, 5))}",
    ]
    if rng.random() < 0.15:
        lines.append(f"klatt {rng.choice(KLATT)}")
    if rng.random() < 0.6:
        lines.append(_tone(rng))
    if rng.random() < 0.3:
        strongest = rng.choice((4, 8, 20))
        lines.append(_numbers("breath", (rng.randint(0, strongest) for _ in range(8))))
    if rng.random() < 0.15:
        lines.append(f"echo {rng.randint(15, 150)} {rng.randint(5, 30)}")
    if rng.random() < 0.4:
        lines.append(f"intonation {rng.randint(1, 4)}")
    if rng.random() < 0.5:
        lines.append(_numbers("stressAdd", (rng.randint(-35, 60) for _ in range(8))))
    if rng.random() < 0.5:
        lines.append(_numbers("stressAmp", (rng.randint(12, 30) for _ in range(8))))
    return "\n".join(lines) + "\n"


def _formant(rng: Random, number: int, throat: float) -> str:
    """Formant 0 is a hum below the first resonance, 1 to 3 make the vowels, 4 and 5 the colour, the rest is weak."""
    if number == 0:
        frequency, spread = rng.gauss(1, 0.1), 1.6
    elif number <= 3:
        frequency, spread = throat * rng.gauss(1, 0.09), 1.6
    else:
        frequency, spread = throat * rng.gauss(1, 0.13), 1.9
    height = _around(rng, 100, spread, 20, 250)
    if number > 5 and rng.random() < 0.15:
        height = 0
    added = rng.randint(-60 * number, 60 * number) if number in (1, 2) and rng.random() < 0.3 else 0
    return f"formant {number} {round(100 * frequency)} {height} {_around(rng, 110, 1.5, 40, 250)} {added}"


def _tone(rng: Random) -> str:
    """A curve over frequencies, which mostly falls: pairs of Hz and height, of which 255 is the highest."""
    height = rng.uniform(120, 255)
    points: list[int] = []
    for least, most in ((200, 700), (900, 1500), (1900, 3000), (3400, 5000)):
        points += [rng.randint(least, most), round(height)]
        height = _within(height * rng.uniform(0.3, 1.3), 30, 255)
    return _numbers("tone", points)


def _around(rng: Random, middle: float, spread: float, least: int, most: int) -> int:
    """Two of three are within a factor of `spread`."""
    return round(_within(middle * spread ** rng.gauss(0, 1), least, most))


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _numbers(name: str, values: Iterable[int]) -> str:
    return " ".join((name, *map(str, values)))


def own_data(data: Path) -> Path:
    """A folder of espeak-ng's data: links to all there is, and room for speakers. It lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="speakers-"))
    # Not atexit: a process that multiprocessing has started does not get there.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    _link_all(data, folder, SPEAKERS.parts)
    return folder


def _link_all(source: Path, folder: Path, apart: tuple[str, ...]) -> None:
    """Links to what is in the source; the folders of the path `apart` are made, with such links in them."""
    for entry in sorted(source.resolve().iterdir()):
        if apart and entry.name == apart[0]:
            (folder / entry.name).mkdir()
            _link_all(entry, folder / entry.name, apart[1:])
        else:
            (folder / entry.name).symlink_to(entry)


def write_variant(own: Path, text: str) -> str:
    """Makes this the speaker whose name is returned: one for each process, since a fork has its parent's folder.

    The dot keeps the file out of espeak-ng's list.
    """
    name = f".{os.getpid()}"
    file = own / SPEAKERS / name
    file.unlink(missing_ok=True)  # ext4 takes milliseconds to close a file that was emptied
    file.write_text(text)
    return name
