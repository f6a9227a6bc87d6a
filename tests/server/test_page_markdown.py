"""The page's own parsers, in a browser: Markdown becomes nodes and never markup, events come out whole."""

import json
import random

import pytest
from conftest import ScriptedBackend, serving
from page_browser import Visits, launched

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
def page():
    with launched() as browser, serving(ScriptedBackend) as running:
        visits = Visits(browser)
        yield visits.open(running.url)
        visits.close()


def render(page, text):
    return page.evaluate(RENDER, [text])[0]


LINK = 'target="_blank" rel="noopener noreferrer"'


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
            ">" * 5000 + " a",
            "- " * 5000 + "a",
            "*a **b " * 3000 + "** *" * 3000,
            "\n".join("  " * n + "- a" for n in range(300)),
        ],
    )
    assert max(depth) < 60


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


def test_events_come_out_whole_wherever_they_are_cut(page):
    events = ["plain", '{"a": "ü漢😀"}', "two\nlines", "[DONE]"]
    stream = b": reading\n\nevent: x\r\ndata: plain\r\n\r\n" + b"id: 1\ndata:" + events[1].encode() + b"\n\n"
    stream += b"data: two\rdata: lines\r\rretry: 5\n\ndata: [DONE]\n\n"
    found = page.evaluate(
        """async (bytes) => {
          const { EventParser } = await import("/page/event_stream.js");
          const stream = Uint8Array.from(bytes);
          const results = [];
          for (let size = 1; size <= stream.length; size += 1) {
            const parser = new EventParser();
            const events = [];
            for (let at = 0; at < stream.length; at += size) {
              events.push(...parser.push(stream.subarray(at, at + size)));
            }
            results.push(JSON.stringify(events));
          }
          return results;
        }""",
        list(stream),
    )
    assert len(found) == len(stream)
    assert set(found) == {json.dumps(events, ensure_ascii=False, separators=(",", ":"))}
