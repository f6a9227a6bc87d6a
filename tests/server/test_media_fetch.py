"""Fetching for strangers: from a server on this machine, by names that only the test's resolver knows."""

import asyncio
import ssl
import time

import pytest
from media_origin import Names, ok, redirect, serving

import tilewright
from tilewright.server.media import fetch as addresses
from tilewright.server.media.fetch import Fetcher, FetchError
from tilewright.types import RequestError

NAMES = {
    "media.example": [["127.0.0.1"]],
    "inside.example": [["127.0.0.2"]],
    "both.example": [["127.0.0.1", "10.0.0.1"]],
}

# Made for this test: nobody else knows the certificate's authority, which is itself.
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgMYXidDDhtkkDAzcf
Db4bVbwa2DgGGe0O7wYheaORO7ahRANCAASWX7GFbpyhGtV4gI1GkepzkRZtb/6y
q6kfnXHACG+/AyWbmdqYLViVMnPlz72uWboqgcptTrqBo0HnlEFLo9Wb
-----END PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBbDCCAROgAwIBAgIBATAKBggqhkjOPQQDAjAYMRYwFAYDVQQDDA1tZWRpYS5l
eGFtcGxlMCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYD
VQQDDA1tZWRpYS5leGFtcGxlMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEll+x
hW6coRrVeICNRpHqc5EWbW/+squpH51xwAhvvwMlm5namC1YlTJz5c+9rlm6KoHK
bU66gaNB55RBS6PVm6NMMEowDwYDVR0TAQH/BAUwAwEB/zAdBgNVHQ4EFgQUZDI3
afHpokYwWCIybd1CXlPG2PYwGAYDVR0RBBEwD4INbWVkaWEuZXhhbXBsZTAKBggq
hkjOPQQDAgNHADBEAiAe+Q415B2m8pmVxzYLM3DXDJHtBaN4CA/7cKf7qU18FAIg
FJTvyvpi7CCxqdIFpJlrCmNW6LZr6MOeSMMIAsISCG0=
-----END CERTIFICATE-----
"""


@pytest.fixture
def public_loopback(monkeypatch):
    """127.0.0.1 passes for public; all that is private stays so, 127.0.0.2 too."""
    real = addresses.is_public
    monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.1" or real(address))


def fetch(url, answers, names=None, *, max_bytes=1000, tls=None, take=lambda num_bytes: None, **options):
    """(what came or the error, the origin, the resolver); PORT in the URL and the answers is the origin's."""
    resolver = Names(NAMES if names is None else names)

    async def run():
        async with serving(answers, tls) as origin:
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    answers[path] = answer.replace(b"PORT", str(origin.port).encode())
            settings = {"max_redirects": 3, "timeout_s": 10.0, "allow_private": False, **options}
            fetcher = Fetcher(resolve=resolver, **settings)
            try:
                return await fetcher.fetch(url.replace("PORT", str(origin.port)), max_bytes, take), origin
            except RequestError as error:
                return error, origin
            finally:
                await fetcher.close()

    result, origin = asyncio.run(run())
    return result, origin, resolver


def refused(url, answers, *args, **options):
    """(the reason, the origin, the resolver)."""
    error, origin, resolver = fetch(url, answers, *args, **options)
    assert isinstance(error, FetchError), error
    return str(error), origin, resolver


def test_what_is_sent_and_what_comes(public_loopback):
    data, origin, _ = fetch(
        "http://media.example:PORT/a%20b/ü?q=1&r=[x]#here", {"/a%20b/%C3%BC?q=1&r=%5Bx%5D": ok(b"picture")}
    )
    assert data == b"picture"
    ((_, headers),) = origin.requests
    assert headers == {
        "Host": f"media.example:{origin.port}",
        "User-Agent": f"tilewright/{tilewright.__version__}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }  # fmt: skip


def test_proxies_of_the_environment_are_not_used(public_loopback, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.2:9/")
    assert fetch("http://media.example:PORT/a", {"/a": ok(b"direct")})[0] == b"direct"


SPELLINGS = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0",
    "127.0.0.1.", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::1]",
    "good.example@127.0.0.1", "127.0.0.1:PORT@127.0.0.1", "127。0。0。1", "①②⑦.0.0.1", "１２７.0.0.1",
    "169.254.169.254", "[fe80::1%25lo]", "[fe80::1%lo]", "10.0.0.1", "[fd00::1]", "100.64.0.1", "0.0.0.0",
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_however_an_inner_address_is_spelt_nothing_connects_to_it(spelling):
    _, origin, _ = refused(f"http://{spelling}:PORT/", {"/": ok(b"secret")})
    assert origin.requests == []


@pytest.mark.parametrize("host", ["inside.example", "both.example", "nowhere.example"])
def test_hosts_with_an_inner_address_and_unknown_ones_look_the_same(host, public_loopback):
    """One inner address among public ones is enough; the error does not reveal which names exist inside."""
    reason, origin, _ = refused(f"http://{host}:PORT/", {"/": ok(b"secret")})
    assert reason == "its host has an address that is not public, or none"
    assert origin.requests == []


def test_inner_addresses_can_be_allowed():
    assert fetch("http://inside.example:PORT/", {"/": ok(b"ours")}, allow_private=True)[0] == b"ours"
    reason, *_ = refused("http://nowhere.example:PORT/", {}, allow_private=True)
    assert reason == "its host is unknown"


@pytest.mark.parametrize(
    "target", ["127.0.0.2", "inside.example", "0x7f000002", "[::ffff:127.0.0.2]", "169.254.169.254"]
)
def test_redirects_inside_are_not_followed(target, public_loopback):
    answers = {"/a": redirect(f"http://{target}:PORT/b"), "/b": ok(b"secret")}
    reason, origin, _ = refused("http://media.example:PORT/a", answers)
    assert reason == "its host has an address that is not public, or none"
    assert origin.paths == ["/a"]


def test_a_name_is_resolved_once_per_connection(public_loopback):
    """A name that is public when it is checked and private when it is used: the two are one."""
    names = {"media.example": [["127.0.0.1"], ["127.0.0.2"]]}
    data, _, resolver = fetch("http://media.example:PORT/a", {"/a": ok(b"picture")}, names)
    assert data == b"picture" and resolver.hosts == ["media.example"]


def test_a_name_that_turns_inside_on_the_next_hop_is_refused(public_loopback):
    names = {"media.example": [["127.0.0.1"], ["127.0.0.2"]]}
    closing = redirect("/b").replace(b"Content-Length", b"Connection: close\r\nContent-Length")
    reason, origin, resolver = refused("http://media.example:PORT/a", {"/a": closing, "/b": ok(b"secret")}, names)
    assert reason == "its host has an address that is not public, or none"
    assert origin.paths == ["/a"] and len(resolver.hosts) == 2


def test_the_second_address_is_tried(public_loopback, monkeypatch):
    monkeypatch.setattr(addresses, "is_public", lambda address: True)
    names = {"media.example": [["127.0.0.3", "127.0.0.1"]]}  # nobody listens at the first
    assert fetch("http://media.example:PORT/a", {"/a": ok(b"picture")}, names)[0] == b"picture"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects(status, public_loopback):
    answers = {"/a": redirect("b?c", status), "/b?c": redirect("http://media.example:PORT/d", status), "/d": ok(b"it")}
    data, origin, _ = fetch("http://media.example:PORT/a", answers)
    assert data == b"it" and origin.paths == ["/a", "/b?c", "/d"]


def test_too_many_redirects(public_loopback):
    reason, origin, _ = refused("http://media.example:PORT/a", {"/a": redirect("/a")})
    assert reason == "more than 3 redirects" and len(origin.requests) == 4


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://media.example/", "data:,x", "gopher://127.0.0.2:PORT/_x"]
)
def test_redirects_to_other_schemes(location, public_loopback):
    reason, origin, _ = refused("http://media.example:PORT/a", {"/a": redirect(location)})
    assert reason == f"its scheme is {location.partition(':')[0]}:, expected http: or https:"
    assert origin.paths == ["/a"]


@pytest.mark.parametrize(
    "url,reason",
    [
        ("http://media.example\\@127.0.0.1/", "the URL has a space, a backslash or a control character"),
        ("http://media.example/a\r\nX: y", "the URL has a space, a backslash or a control character"),
        ("http://media.example:99999/", "it is not a URL"),
        ("http://[::1/", "it is not a URL"),
        ("http:///a", "it has no valid host"),
        ("http://media.example:0/", "it has no valid host"),
        ("http://user:pass@media.example/", "the URL names a user, expected none"),
        ("http://\ud800.example/", "it is not a URL"),
    ],
)  # fmt: skip
def test_what_is_no_url(url, reason):
    assert refused(url, {})[0] == reason


def test_a_long_answer_is_refused_by_its_length(public_loopback):
    async def announce(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)  # nobody waits for the rest

    reason, *_ = refused("http://media.example:PORT/a", {"/a": announce})
    assert reason == "1001 bytes, the limit is 1000"


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", "Connection: close"])
def test_an_endless_answer_is_broken_off(head, public_loopback):
    async def endless(writer):
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        for _ in range(10_000):
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n" if "chunked" in head else b"x" * 1024)
            await writer.drain()

    taken = []
    reason, *_ = refused("http://media.example:PORT/a", {"/a": endless}, max_bytes=100_000, take=taken.append)
    assert reason == "more than 100000 bytes, which is the limit"
    assert sum(taken) <= 100_000


@pytest.mark.parametrize("length,expected", [(10, b"0123456789"), (11, None)])
def test_lying_about_the_length(length, expected, public_loopback):
    """What goes beyond is not read; what falls short is refused."""

    async def lie(writer):
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + b"0123456789"[:length])
        if length == 10:
            writer.write(b"HTTP/1.1 200 OK\r\n more of it")
        writer.close()

    result, *_ = fetch("http://media.example:PORT/a", {"/a": lie})
    assert result == expected if expected else str(result) == "the response is incomplete or not HTTP"


def test_a_slow_drip_ends_at_the_deadline(public_loopback):
    async def drip(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
        for _ in range(900):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    assert refused("http://media.example:PORT/a", {"/a": drip}, timeout_s=0.4)[0] == "not fetched within 0.4 seconds"


def test_the_deadline_holds_for_all_hops_together(public_loopback):
    async def late(writer):
        await asyncio.sleep(0.25)
        writer.write(redirect("/a"))

    assert refused("http://media.example:PORT/a", {"/a": late}, timeout_s=0.6)[0] == "not fetched within 0.6 seconds"


def test_a_slow_resolver_ends_at_the_deadline():
    class Slow(Names):
        def __call__(self, host, port):
            time.sleep(1.0)
            return super().__call__(host, port)

    async def run():
        fetcher = Fetcher(max_redirects=3, timeout_s=0.2, allow_private=False, resolve=Slow(NAMES))
        with pytest.raises(FetchError, match="not fetched within"):
            await fetcher.fetch("http://media.example/", 1000, lambda num_bytes: None)
        await fetcher.close()

    asyncio.run(run())


def test_tiny_pieces_are_refused(public_loopback):
    async def crumbs(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")

    reason, *_ = refused("http://media.example:PORT/a", {"/a": crumbs}, max_bytes=10**6)
    assert reason == "it comes in pieces of less than 256 bytes"


@pytest.mark.parametrize("header", ["Content-Encoding: gzip", "content-encoding: identity\r\nContent-Encoding: br"])
def test_compressed_answers_are_refused(header, public_loopback):
    reason, *_ = refused("http://media.example:PORT/a", {"/a": ok(b"x", header)})
    assert reason == "the response is compressed, expected identity"


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500])
def test_errors_have_only_the_status_of_other_responses(status, public_loopback):
    answer = f"HTTP/1.1 {status} Secret words\r\nX-Token: hush\r\nContent-Length: 0\r\n\r\n".encode()
    assert refused("http://media.example:PORT/a", {"/a": answer})[0] == f"the server answered {status}"


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"HTTP/1.1 banana\r\n\r\n", b"+OK secret\r\n\r\n"])
def test_a_response_that_is_not_http_is_not_quoted(answer, public_loopback):
    async def speak(writer):
        writer.write(answer)
        writer.close()

    assert refused("http://media.example:PORT/a", {"/a": speak})[0] == "the response is incomplete or not HTTP"


def test_a_closed_port(public_loopback):
    names = {"media.example": [["127.0.0.1"]]}
    assert refused("http://media.example:9/", {}, names)[0] == "connecting to its host failed"


def test_take_can_refuse_bytes(public_loopback):
    def take(num_bytes):
        raise RequestError(f"no room for {num_bytes}")

    error, *_ = fetch("http://media.example:PORT/a", {"/a": ok(b"12345")}, take=take)
    assert str(error) == "no room for 5"


@pytest.fixture
def certificate(tmp_path):
    path = tmp_path / "certificate.pem"
    path.write_text(KEY + CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


def test_a_certificate_of_ones_own_is_refused(certificate, public_loopback):
    reason, origin, _ = refused("https://media.example:PORT/a", {"/a": ok(b"x")}, tls=certificate)
    assert reason == "its certificate is not trusted" and origin.requests == []


def test_tls_sends_the_host_name(certificate, public_loopback):
    names = []
    certificate.sni_callback = lambda connection, name, context: names.append(name)
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    url, answers = "https://media.example:PORT/a", {"/a": ok(b"x")}
    assert fetch(url, answers, tls=certificate, ssl_context=trusting)[0] == b"x"
    assert names == ["media.example"]
    other = {"other.example": [["127.0.0.1"]]}
    reason, *_ = refused(url.replace("media", "other"), answers, other, tls=certificate, ssl_context=trusting)
    assert reason == "its certificate is not trusted"


def test_plain_http_behind_https(public_loopback):
    reason, *_ = refused("https://media.example:PORT/a", {"/a": ok(b"x")}, timeout_s=0.6)
    assert reason in ("no secure connection could be made", "connecting to its host failed")
