"""A data: URL decoded piece by piece gives what it gives decoded at once."""

import base64
import string
from urllib.parse import unquote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilewright.inputs.media import MediaLimits, open_url
from tilewright.server.media import sources
from tilewright.types import RequestError

LIMITS = MediaLimits(max_bytes=40)
encoded = st.binary(max_size=45).map(lambda data: base64.b64encode(data).decode())
noise = st.text(string.ascii_letters + "+/=% \n%3D2bB-\xe9", max_size=60)
texts = st.one_of(encoded, noise, st.tuples(encoded, noise, encoded).map("".join))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 7)


def outcome(decode):
    """The bytes, or "refused"; the words of an error come from Python's decoder, which sees other pieces."""
    try:
        return decode()
    except RequestError as error:
        assert str(error).startswith("image 1: ")
        return "refused"


@given(st.sampled_from(["data:image/png;base64,", "data:;BASE64,", "data:,"]), texts)
def test_pieces_and_whole(head, text):
    assume("====" not in "".join(unquote(text).split()))  # Python's decoder takes it after whole groups alone
    url = head + text
    at_once = outcome(lambda: open_url(url, "image 1", LIMITS))
    assert outcome(lambda: sources.decode_data_url(url, "image 1", LIMITS)) == at_once


@pytest.mark.parametrize("text", ["YWJjZGVm", "YWJj\r\nZGVm", "YWJj ZGVm  ", "YWJjZGV%6d", "%59WJjZGVm", "YWJjZG%56m"])
def test_spaces_and_escapes(text):
    assert sources.decode_data_url(f"data:image/png;base64,{text}", "image 1", LIMITS) == b"abcdef"


@pytest.mark.parametrize(
    "text", ["YWJjZA==YWJj", "YWJjYWJjYQ==     YWJj", "YWJjYWJjYQ==     A", "YWJjYWJjY", "YWJj-_=="]
)
def test_what_is_not_base64(text):
    with pytest.raises(RequestError, match="image 1: the data: URL is not base64: "):
        sources.decode_data_url(f"data:image/png;base64,{text}", "image 1", LIMITS)


def test_no_more_is_decoded_than_the_limit():
    with pytest.raises(RequestError, match="image 1: 42 bytes or more, the limit is 40"):
        sources.decode_data_url("data:," + "%" * 1_000_000, "image 1", LIMITS)
