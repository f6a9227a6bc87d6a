"""Takes the pictures of the page in docs/images.

python tests/server/page_screenshots.py [URL]    of a server that runs, or else of one that answers from a script
"""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("server", ".", "ops", "models")]
sys.path.insert(0, str(TESTS.parent / "src"))

from conftest import ScriptedBackend, serving  # noqa: E402
from page_browser import launched, wait_until_done  # noqa: E402

from tilewright.server.backend import Chunk, Ended, ModelInfo, Started  # noqa: E402
from tilewright.types import Timings  # noqa: E402

FOLDER = TESTS.parent / "docs" / "images"
MAX_BYTES = 200_000
SHOTS = {
    "page_light.png": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "page_phone_dark.png": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 2, "is_mobile": True,
    },
}  # fmt: skip
FIRST_TOKEN_S, TOKEN_S = 0.2, 0.02
ANSWER = """Three shapes and a word on a **cream** ground:

| what | colour | where |
| --- | --- | --- |
| square | blue | top left |
| circle | red | top right |
| triangle | yellow | bottom left |

The word at the bottom right reads `TILE`.
"""


class PacedBackend(ScriptedBackend):
    """Answers at the pace of a small model on a laptop, and tells the times it took."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ModelInfo("scripted", 32768, 8, None, ("image", "video"))

    def submit(self, ask, listener):
        answering = asyncio.create_task(self._answer(listener))
        return answering.cancel

    async def _answer(self, listener):
        began_s = time.perf_counter()
        pieces = [ANSWER[start : start + 4] for start in range(0, len(ANSWER), 4)]
        await asyncio.sleep(FIRST_TOKEN_S)
        listener(Started(300, False))
        first_token_s = time.perf_counter() - began_s
        for piece in pieces:
            listener(Chunk(0, piece, 1))
            await asyncio.sleep(TOKEN_S)
        listener(Chunk(0, "", 1, "stop"))
        listener(Ended(300, 0, len(pieces) + 1, Timings(0.0, first_token_s, time.perf_counter() - began_s)))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(serving(PacedBackend)).url
        browser = stack.enter_context(launched())
        for name, options in SHOTS.items():
            context = browser.new_context(**options, reduced_motion="reduce")
            page = context.new_page()
            page.goto(url)
            for card in (2, 1, 0):  # the first, which shows a picture, last
                page.keyboard.press("Control+Shift+O")
                page.locator(".welcome .card").nth(card).click()
                page.locator(".answer").wait_for()
                wait_until_done(page)
            page.evaluate("document.activeElement.blur()")
            page.screenshot(path=FOLDER / name)
            context.close()
            size_bytes = (FOLDER / name).stat().st_size
            print(f"{name}: {size_bytes} bytes")
            assert size_bytes <= MAX_BYTES, f"{name} has {size_bytes} bytes, the limit is {MAX_BYTES}"


if __name__ == "__main__":
    main()
