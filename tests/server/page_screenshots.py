"""The images of the page in docs/images, of the embedded model: python tests/server/page_screenshots.py"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("server", ".", "ops", "models")]

from page_browser import launched, wait_until_done  # noqa: E402
from serve_process import ServerProcess  # noqa: E402

FOLDER = TESTS.parent / "docs" / "images"
MAX_BYTES = 200_000
SHOTS = {
    "page_light.png": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "page_phone_dark.png": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "device_scale_factor": 2, "is_mobile": True,
    },
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    server = ServerProcess(None, TILEWRIGHT_NUM_THREADS=str(os.cpu_count()))
    try:
        with launched() as browser:
            for name, options in SHOTS.items():
                take(browser.new_context(**options, reduced_motion="reduce"), server.url, FOLDER / name)
    finally:
        server.end()


def take(context, url: str, file: Path) -> None:
    page = context.new_page()
    page.goto(url)
    for card in (2, 1, 0):  # the first, which shows an image, last
        page.keyboard.press("Control+Shift+O")
        page.locator(".welcome .card").nth(card).click()
        page.locator(".answer").wait_for()
        wait_until_done(page)
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=file)
    context.close()
    size_bytes = file.stat().st_size
    print(f"{file.name}: {size_bytes} bytes")
    assert size_bytes <= MAX_BYTES, f"{file.name} has {size_bytes} bytes, the limit is {MAX_BYTES}"


if __name__ == "__main__":
    main()
