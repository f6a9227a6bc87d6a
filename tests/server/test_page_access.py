"""The page for everybody: by keyboard, by ear, in both themes, on a phone."""

import re
from pathlib import Path

import pytest
from conftest import ScriptedBackend, serving
from page_browser import send, until, wait_until_done

PHONE = {"viewport": {"width": 360, "height": 740}}
ANSWER = """# Heading

Text with **bold**, `code` and [a link](https://example.org), a_very_long_word_without_any_break_""" + "x" * 300 + """

- list
  - nested

> quote

| a wide table | with columns | that do not fit | a phone's screen |
|---|---|---|---|
| 1 | 2 | 3 | """ + "y" * 80 + """ |

```python
print("a line of code that is far too long for the screen of a phone, and so has to scroll by itself")
```
"""  # fmt: skip
CONTROLS = {"button", "textbox", "combobox", "link", "checkbox", "DisclosureTriangle", "spinbutton", "searchbox"}
# The lowest contrast of each visible text with the first opaque colour under it. Disabled controls may be faint.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([red, green, blue]) => {
    const [r, g, b] = [red, green, blue].map((value) => {
      const share = value / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const under = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const isSeen = node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!walker.currentNode.data.trim() || !isSeen) continue;
    if (node.closest(":disabled, .visually-hidden, .skip, noscript, svg")) continue;
    const [one, other] = [luminance(rgba(getComputedStyle(node).color)), luminance(under(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    found.push([Math.round(ratio * 100) / 100, walker.currentNode.data.trim().slice(0, 40), node.className]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}"""


@pytest.fixture(scope="module")
def url():
    template = (Path(__file__).parents[1] / "data" / "qwen3.jinja").read_text()
    backend = ScriptedBackend(["<think>Hm</think>", ANSWER], template=template, accepts=("image", "video"))
    with serving(lambda: backend) as running:
        yield running.url


def names(page):
    """(role, name) of all controls, as a screen reader gets them."""
    devtools = page.context.new_cdp_session(page)
    nodes = devtools.send("Accessibility.getFullAXTree")["nodes"]
    devtools.detach()
    return [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in CONTROLS
    ]


def check_names(page, least):
    found = names(page)
    assert len(found) >= least and all(name.strip() for _, name in found), found


def check_contrast(page):
    lowest = page.evaluate(CONTRASTS)
    assert lowest and lowest[0][0] >= 4.5, lowest[:5]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_texts_have_contrast(url, visits, scheme):
    page = visits.open(url, color_scheme=scheme)
    check_names(page, 10)
    check_contrast(page)
    send(page, "Show me everything")
    wait_until_done(page)
    page.locator("details summary").click()
    check_names(page, 14)
    check_contrast(page)
    for name in ("Settings", "Keys"):
        page.get_by_role("button", name=name, exact=True).click()
        check_names(page, 1)
        check_contrast(page)
        page.keyboard.press("Escape")
    page.locator(".title").first.hover()
    page.get_by_role("button", name=re.compile("^Delete Show")).click()
    check_contrast(page)


def test_errors_and_notices_have_contrast_in_both_themes(visits):
    backend = ScriptedBackend()
    visits.expected += ["Failed to load resource"]
    with serving(lambda: backend) as running:
        page = visits.open(running.url)
        backend.error = RuntimeError("of our own making")
        send(page, "Fail")
        wait_until_done(page)
    page.evaluate("document.querySelector('#banner').hidden = false")
    page.evaluate("document.querySelector('#banner').textContent = 'The server cannot be reached.'")
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        check_contrast(page)


def test_landmarks(url, visits):
    page = visits.open(url)
    send(page, "Hi")
    wait_until_done(page)
    for role in ("main", "complementary", "navigation", "banner", "log"):
        assert page.get_by_role(role).count() == 1, role
    assert page.locator("h1").count() == 1 and page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"
    assert page.get_by_role("log").get_attribute("aria-live") == "off"


def test_a_phone_scrolls_down_only(url, visits):
    page = visits.open(url, **PHONE)
    fits = "document.documentElement.scrollWidth <= innerWidth && [...document.querySelectorAll('.scrolling, .column')]"
    fits += ".every((node) => node.scrollWidth <= node.clientWidth)"
    assert page.evaluate(fits)
    assert page.locator("#sidebar").is_hidden()
    send(page, "A long answer for a small screen " + "z" * 200)
    wait_until_done(page)
    assert page.evaluate(fits)
    until(page, "document.querySelector('.code pre').scrollWidth > document.querySelector('.code pre').clientWidth")
    page.get_by_role("button", name="Conversations", exact=True).click()
    page.locator("#sidebar").wait_for()
    assert page.evaluate("document.querySelector('#stage').inert") and page.evaluate(fits)
    page.keyboard.press("Escape")
    until(page, "document.activeElement.id === 'menu'")
    page.get_by_role("button", name="Settings", exact=True).click()
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_by_keyboard_alone(url, visits):
    page = visits.open(url)
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#question").input_value() == "one\ntwo"
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert page.locator(".bubble").inner_text() == "one\ntwo"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    assert page.get_by_role("dialog").get_by_text("Stop the answer").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question" and page.locator("#question").input_value() == ""
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome").wait_for()
    until(page, "document.activeElement.id === 'question'")
    seen = []
    for _ in range(30):  # once around, and the browser's own
        page.keyboard.press("Tab")
        focused = "(node => node && [node.getAttribute('aria-label') ?? node.textContent.trim(),"
        focused += " getComputedStyle(node).outlineStyle, node.id])(document.activeElement)"
        name, outline, identity = page.evaluate(focused)
        seen.append(name)
        # The box around the question shows where the focus is.
        assert outline != "none" or identity in ("question", ""), name
    assert {"Skip to the question", "New conversation", "Delete all", "Keys", "Settings", "Question"} <= set(seen)


def test_typing_does_not_wait_for_what_the_browser_keeps(url, visits):
    page = visits.open(url, scripts=["IDBObjectStore.prototype.getAll = () => ({});"])  # never answers
    page.keyboard.type("one")
    assert page.locator("#question").input_value() == "one"


def test_the_theme_is_kept(url, visits):
    page = visits.open(url, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    for label in ("Theme: as the system", "Theme: light"):
        page.get_by_role("button", name=label).click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark and page.get_by_role("button", name="Theme: dark").is_visible()


def test_reduced_motion_is_respected(url, visits):
    page = visits.open(url, reduced_motion="reduce")
    moving = "[...document.querySelectorAll('*')].map((node) => getComputedStyle(node).transitionDuration)"
    assert set(page.evaluate(moving)) == {"0s"}
