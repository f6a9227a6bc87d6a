"""The page's own parsers, in a browser: Markdown becomes nodes and never markup, events come out whole."""

import itertools
import json
import random

import pytest
from conftest import ScriptedBackend, serving
from page_browser import Visits

SIZE = 100_000  # characters: what takes quadratic time would not end here
PIECES = [
    "word ", "two words", "\n", "\n", "\n\n", "\n\n", "# ", "## head", "- item", "\n- ", "\n  - ", "\n1. ", "2) ", "> ",
    "\n> ", "```", "\n```\n", "```python\ncode()\n", "~~~", "`", "`code`", "**", "*", "_", "***bold***", "~~", "[",
    "](", ")", "[a](https://b.c/d)", "![p](http://x.y/z.png)", "|", "| a | b |\n", "|---|:-:|\n", "\n---\n", "***",
    "<b>", "&amp;", "&lt", "\\", "\\*", "https://x.org/a_b(c). ", "    ", "\t", "\r\n", "#", "-", "+", "=", "ü", "漢字",
    "😀", "<https://e.org>", "1.",
]  # fmt: skip
RENDER = """async (texts) => {
  const { renderMarkdown } = await import("/page/markdown.js");
  return texts.map((text) => {
    const root = document.createElement("div");
    renderMarkdown(root, text);
    for (const button of root.querySelectorAll("button")) button.remove();
    return root.innerHTML;
  });
}"""
STREAM = """async ([text, cuts]) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const root = document.createElement("div");
  const view = new MarkdownView(root);
  for (const cut of cuts) view.update(text.slice(0, cut));
  view.finish(text);
  for (const button of root.querySelectorAll("button")) button.remove();
  return root.innerHTML;
}"""


@pytest.fixture(scope="module")
def visits(browser):
    visits = Visits(browser)
    yield visits
    visits.close()


@pytest.fixture(scope="module")
def page(visits):
    with serving(ScriptedBackend) as running:
        yield visits.open(running.url)


def render(page, text):
    return page.evaluate(RENDER, [text])[0]


LINK = 'target="_blank" rel="noopener noreferrer"'
IMAGE = '<svg class="icon" aria-hidden="true"><use href="#icon-image"></use></svg>'
MANY = 20_000


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n###### B ##", '<h3 class="heading-1">A</h3><h6 class="heading-6">B</h6>'),
        ("#no\n\n####### seven", "<p>#no</p><p>####### seven</p>"),
        ("**b** *i* ***both*** __b__ _i_ ~~d~~",
         "<p><strong>b</strong> <em>i</em> <em><strong>both</strong></em> <strong>b</strong> <em>i</em>"
         " <del>d</del></p>"),
        ("snake_case_name 2*3*4 * a *", "<p>snake_case_name 2<em>3</em>4 * a *</p>"),
        ("**a *b* c** *open", "<p><strong>a <em>b</em> c</strong> *open</p>"),
        ("`a*b*` ``x`y`` `open", "<p><code>a*b*</code> <code>x`y</code> `open</p>"),
        ("- a\n- b\n  - c\n    - d\n- e",
         "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><ul><li><p>d</p></li></ul></li></ul></li>"
         "<li><p>e</p></li></ul>"),
        ("3. a\n4. b\n\n   more", '<ol start="3"><li><p>a</p></li><li><p>b</p><p>more</p></li></ol>'),
        ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
        ("- a\n1. b", "<ul><li><p>a</p></li></ul><ol><li><p>b</p></li></ol>"),
        ("It was\n1986. A year", "<p>It was<br>1986. A year</p>"),
        ("> a\n> > b\nlazy", "<blockquote><p>a</p><blockquote><p>b<br>lazy</p></blockquote></blockquote>"),
        ("a\n\n---\n\n* * *", "<p>a</p><hr><hr>"),
        ("[a](https://b.c/d) <https://e.f> https://g.h/i.",
         f'<p><a href="https://b.c/d" {LINK}>a</a> <a href="https://e.f/" {LINK}>https://e.f</a>'
         f' <a href="https://g.h/i" {LINK}>https://g.h/i</a>.</p>'),
        ("[**b** `c`](mailto:x@y.z 'title')",
         f'<p><a href="mailto:x@y.z" {LINK}><strong>b</strong> <code>c</code></a></p>'),
        ("(https://en.wiki.org/a_(b))",
         f'<p>(<a href="https://en.wiki.org/a_(b)" {LINK}>https://en.wiki.org/a_(b)</a>)</p>'),
        ("[a] [b](c", "<p>[a] [b](c</p>"),
        ("[a ![b **c** [d]](https://e.f)](https://g.h)",
         f'<p><a href="https://g.h/" {LINK}>a <a href="https://e.f/" {LINK}>{IMAGE} b c [d]</a></a></p>'),
        ("\\*no\\* &lt;b&gt; &#65; &copy; &nothing;", "<p>*no* &lt;b&gt; A © &amp;nothing;</p>"),
    ],
)  # fmt: skip
def test_what_is_understood(page, text, html):
    assert render(page, text) == html


def test_code_and_tables(page):
    html = render(page, "```js\nif (a < b) {}\n\n  x\n```\nafter")
    assert (
        "<code>if (a &lt; b) {}\n\n  x</code>" in html and "<span>js</span>" in html and html.endswith("<p>after</p>")
    )
    assert "<code>open\nstill</code>" in render(page, "~~~\nopen\nstill")
    html = render(page, "| a | b |\n|:--|--:|\n| 1 | `x` \\| y | 3 |\n| only |")
    assert '<th>a</th><th class="to-end">b</th>' in html
    assert '<tr><td>1</td><td class="to-end"><code>x</code> | y</td></tr><tr><td>only</td></tr>' in html
    assert render(page, "a | b\n--|--|--") == "<p>a | b<br>--|--|--</p>"


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
        "[x](javascript:window.hacked=1) [y](JaVaScRiPt:window.hacked=1) [z](java\tscript:window.hacked=1)",
        "[x](&#106;avascript:window.hacked=1) <javascript:window.hacked=1> [v](vbscript:x)",
        "[d](data:text/html,<script>window.hacked=1</script>)",
        "![x](javascript:window.hacked=1) ![y](https://tracker.example/pixel.png)",
        '[x](https://a.b/" onclick="window.hacked=1) [y](<https://a.b/"onmouseover=1>)',
        "```\"><script>window.hacked = 1</script>\n</code></pre><script>window.hacked = 1</script>\n```",
        "| <b> | [x](javascript:1) |\n|---|---|\n| <svg onload=window.hacked=1> | `</td>` |",
        "[relative](/v1/models) [other](//evil.example/x) [file](file:///etc/passwd)",
    ],
)  # fmt: skip
def test_hostile_text_stays_text(page, text):
    found = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          const root = document.createElement("div");
          document.body.append(root);
          renderMarkdown(root, text);
          const nodes = [...root.querySelectorAll("*")];
          const found = {
            tags: [...new Set(nodes.map((node) => node.localName))],
            attributes: [...new Set(nodes.flatMap((node) => node.getAttributeNames()))],
            schemes: [...root.querySelectorAll("a")].map((node) => node.protocol),
            hosts: [...root.querySelectorAll("a")].map((node) => node.host),
          };
          root.remove();
          return found;
        }""",
        text,
    )
    assert not {"script", "img", "b", "iframe", "style"} & set(found["tags"])
    assert not [name for name in found["attributes"] if name.startswith("on") or name in ("src", "style", "srcset")]
    assert set(found["schemes"]) <= {"http:", "https:", "mailto:"}
    assert "127.0.0.1" not in str(found["hosts"])  # no link into this server
    page.wait_for_timeout(20)
    assert page.evaluate("window.hacked === undefined")


@pytest.mark.parametrize(
    "unit",
    [
        "*", "**a", "*a ", "a* ", "*a _b ", "_", "`", "``a`", "[", "](", "[a](", "![", "[a](b", "<", "<http://", "&",
        "https://x.y/) ", "\\", "> ", "- ", "1. ", "#", "~~a ", "|", "| a ", "a\n", "```\n", "> - ", "\t", " ", "-",
        "(", "((", "[](", "a|b\n-|-\n", "é😀", "!", "]",
    ],
)  # fmt: skip
def test_long_hostile_lines_end(page, unit):
    text = (unit * SIZE)[:SIZE]
    (html,) = page.evaluate(RENDER, [text + "x"])
    assert len(html) < 40 * SIZE


def test_depth_is_bounded(page):
    depth = page.evaluate(
        """async (texts) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          const depthOf = (node) => 1 + Math.max(0, ...[...node.children].map(depthOf));
          return texts.map((text) => {
            const root = document.createElement("div");
            renderMarkdown(root, text);
            return depthOf(root);
          });
        }""",
        [
            ">" * MANY + " a",
            "- " * MANY + "a",
            "> - " * MANY + "a",
            "1. > " * MANY + "a",
            "*a **b " * MANY + "** *" * MANY,
            "_a" * MANY + "_" * MANY,
            "~~a " * MANY + " a~~" * MANY,
            "![" * MANY + "](a)" * MANY,
            "![a" * MANY + "](https://b.c)" * MANY,
            "[" * MANY + "](a)" * MANY,
            "[![" * MANY + "](a)](b)" * MANY,
            "![[" * MANY + "](a)](b)" * MANY,
            "*[![" * MANY + "](a)](b)*" * MANY,
            "\n".join("  " * n + "- a" for n in range(300)),
        ],
    )
    assert max(depth) < 60


@pytest.mark.parametrize(
    ("head", "unit"), [("", "a\n\n"), ("|a\n|-\n", "|a\n"), ("|a" * 150_000 + "\n" + "|-" * 150_000 + "\n", "|a")]
)
def test_many_of_a_kind_are_all_shown(page, head, unit):
    count = 150_000  # more than a call takes arguments
    shown = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/page/markdown.js");
          const root = document.createElement("div");
          renderMarkdown(root, text);
          return [root.className, root.querySelectorAll("p, td").length];
        }""",
        head + unit * count,
    )
    assert shown == ["", count]


def test_what_cannot_be_drawn_is_shown_as_it_is_written(page, visits):
    visits.expected.append("its Markdown could not be")
    text = "Before\n\n| a |\n|---|\n| b |"
    shown = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          const create = document.createElement;
          document.createElement = (tag) => {
            if (tag === "table") throw new RangeError("Maximum call stack size exceeded");
            return create.call(document, tag);
          };
          view.update(text);
          document.createElement = create;
          view.finish(text + " and more");
          return [root.textContent, root.className];
        }""",
        text,
    )
    assert shown == [text + " and more", "plain"]


def test_what_takes_long_to_draw_is_drawn_less_often(page):
    (_, num_frames, num_quick), (took_ms, _, num_slow) = page.evaluate(
        """async () => {
          const { Pace } = await import("/page/pace.js");
          const real = [performance.now, window.requestAnimationFrame, window.setTimeout];
          let nowMs = 0;
          let timers = [];
          performance.now = () => nowMs;
          window.requestAnimationFrame = (does) => timers.push([nowMs, does]);
          window.setTimeout = (does, pauseMs) => timers.push([nowMs + pauseMs, does]);
          const results = [];
          for (const drawMs of [1, 80]) {
            let numDraws = 0;
            const pace = new Pace(() => { nowMs += drawMs; numDraws += 1; });
            let numFrames = 0;
            for (const endMs = nowMs + 10000; nowMs < endMs; nowMs += 16) {
              numFrames += 1;
              pace.changed();
              const due = timers.filter(([atMs]) => atMs <= nowMs);
              timers = timers.filter(([atMs]) => atMs > nowMs);
              for (const [, does] of due) does();
            }
            results.push([numDraws * drawMs, numFrames, numDraws]);
            timers = [];
          }
          [performance.now, window.requestAnimationFrame, window.setTimeout] = real;
          return results;
        }"""
    )
    assert num_quick == num_frames and took_ms <= 2100 and num_slow >= 20  # a fifth of 10 s


def test_a_text_that_grows_ends_as_if_it_had_come_at_once(page):
    random_ = random.Random(7)
    cases = []
    for _ in range(400):
        text = "".join(random_.choices(PIECES, k=random_.randrange(1, 25)))
        cuts = sorted(random_.sample(range(len(text) + 1), min(len(text), 12)))
        cases.append((text, cuts))
    whole = page.evaluate(RENDER, [text for text, _ in cases])
    grown = page.evaluate(f"(cases) => Promise.all(cases.map({STREAM}))", cases)
    for (text, cuts), one, other in zip(cases, whole, grown, strict=True):
        assert one == other, (text, cuts)


def test_blocks_that_are_done_are_left_alone(page):
    kept = page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/page/markdown.js");
          const root = document.createElement("div");
          const view = new MarkdownView(root);
          let text = "# One\\n\\nTwo\\n\\n- three\\n\\nfour";
          view.update(text);
          const first = [...root.children].slice(0, 2); // the third may yet go on in the line that came last
          text += " five\\n\\n```\\ncode\\n";
          view.update(text);
          const code = root.querySelector("code").firstChild;
          for (let line = 0; line < 100; line += 1) view.update((text += `line ${line}\\n`));
          const isKept = first.every((node, index) => root.children[index] === node);
          return [isKept, root.querySelector("code").firstChild === code, code.data.includes("line 99")];
        }"""
    )
    assert kept == [True, True, True]


@pytest.mark.parametrize("ends", [(b"\r",), (b"\n",), (b"\r\n",), (b"\r\n", b"\n"), (b"\r\n", b"\r")])
def test_events_come_out_whole_wherever_they_are_cut(page, ends):
    events = ["plain", '{"a": "ü漢😀"}', "two\nlines", "[DONE]"]
    lines = [b": reading", b"", b"event: x", b"data: plain", b"", b"id: 1", b"data:" + events[1].encode(), b""]
    lines += [b"data: two", b"data: lines", b"", b"retry: 5", b"", b"data: [DONE]", b""]
    stream = b"".join(line + end for line, end in zip(lines, itertools.cycle(ends)))
    found = page.evaluate(
        """async (bytes) => {
          const { EventParser } = await import("/page/event_stream.js");
          const stream = Uint8Array.from(bytes);
          const results = new Set();
          for (let one = 0; one <= stream.length; one += 1) {
            for (let other = one; other <= stream.length; other += 1) {
              const parser = new EventParser();
              const pieces = [stream.subarray(0, one), stream.subarray(one, other), stream.subarray(other)];
              results.add(JSON.stringify(pieces.flatMap((piece) => parser.push(piece))));
            }
          }
          const parser = new EventParser();
          results.add(JSON.stringify([...stream].flatMap((byte) => parser.push(Uint8Array.of(byte)))));
          return [...results];
        }""",
        list(stream),
    )
    assert found == [json.dumps(events, ensure_ascii=False, separators=(",", ":"))]


def test_an_answer_is_complete_when_it_says_so(page):
    chunk = {"choices": [{"index": 0, "delta": {"content": "all"}, "finish_reason": "stop"}]}
    texts = page.evaluate(
        """async (chunk) => {
          const { Api } = await import("/page/api.js");
          const parts = [`data: ${JSON.stringify(chunk)}\\n\\n`, "data: [DONE]\\n\\n"];
          const real = window.fetch;
          window.fetch = async () => new Response(new ReadableStream({
            pull(controller) {
              if (parts.length) controller.enqueue(new TextEncoder().encode(parts.shift()));
              else controller.error(new TypeError("network error"));
            },
          }));
          try {
            const texts = [];
            for await (const one of new Api().chat({})) texts.push(one.choices[0].delta.content);
            return texts;
          } finally {
            window.fetch = real;
          }
        }""",
        chunk,
    )
    assert texts == ["all"]
