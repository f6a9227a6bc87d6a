"""How many captions of the test set are drawn right, as the embedded model that looks at images sees it. From the top
of the repository:

python -m training.tiny_draw.evaluate
python -m training.tiny_draw.evaluate --model candidate --set validation --guidance 2 --steps 12
python -m training.tiny_draw.evaluate --drawn        the judge alone: what it says of the scenes as they were drawn
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from PIL import Image
from tqdm import tqdm

from tilewright import Diffusion, Engine
from tilewright.flags.options import positive
from training.tiny_draw.captions import SETS, Drawing, drawings
from training.tiny_vl.score import is_same, shares_by_kind, table

MAX_TOKENS = 32
MAX_SHOWN = 40


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    marks, lines = [], []
    with Engine() as judge:
        for index, (drawing, image) in enumerate(tqdm(images(options), total=options.count, file=sys.stderr)):
            if options.pictures:
                options.pictures.mkdir(parents=True, exist_ok=True)
                image.save(options.pictures / f"{index:03d}.png")
            wrong = mistakes(judge, drawing, image)
            marks.append((drawing.kind, not wrong))
            lines += [f"{index:03d} {drawing.caption!r}: {line}" for line in wrong]
    shares = shares_by_kind(marks)
    print("\n".join([table(shares, "right"), "", *lines[:MAX_SHOWN]]))
    if options.json:
        found = {kind: [share.num_good, share.count] for kind, share in shares.items()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_draw.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", choices=tuple(SETS), default="test", help="(default: %(default)s)")
    parser.add_argument("--count", type=positive, default=200, metavar="N", help="captions (default %(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a pipeline's folder (default: the embedded one)")
    parser.add_argument("--steps", type=positive, help="default: the pipeline's")
    parser.add_argument("--guidance", type=float, help="default: the pipeline's")
    parser.add_argument("--drawn", action="store_true", help="judge the scenes as they were drawn")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="keep the images")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the shares")
    return parser


def images(options: argparse.Namespace) -> Iterator[tuple[Drawing, Image.Image]]:
    """The first captions of the set, each with its image, whose seed is its place in the set."""
    chosen = islice(drawings(Random(options.set), set_name=options.set), options.count)
    if options.drawn:
        yield from ((drawing, drawing.scene.draw()) for drawing in chosen)
        return
    with Diffusion(options.model) as painter:
        for seed, drawing in enumerate(chosen):
            settings = {"num_steps": options.steps, "guidance": options.guidance, "seed": seed}
            yield drawing, painter.generate(drawing.caption, **settings).images[0]


def mistakes(judge: Engine, drawing: Drawing, image: Image.Image) -> list[str]:
    """What the judge answers otherwise than the caption says; none: the image is right."""
    found = []
    for ask in drawing.asks:
        content = [{"type": "image", "image": image}, {"type": "text", "text": ask.question}]
        answer = judge.chat([{"role": "user", "content": content}], max_tokens=MAX_TOKENS, temperature=0).text
        if not is_same(answer, ask.answer):
            found.append(f"{ask.question} {answer}")
    return found


if __name__ == "__main__":
    sys.exit(main())
