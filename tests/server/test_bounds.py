"""The table of bounds in docs/server.md says what the code has."""

import argparse
from dataclasses import fields

import pytest
from sources import ROOT

from tilewright.cli import serve
from tilewright.cli import serve as flags
from tilewright.engine.constraint.compiler import MAX_SOURCE_BYTES
from tilewright.inputs.messages import MAX_MESSAGES, MAX_VALUES
from tilewright.server.api import bodies
from tilewright.server.api.responses.request import MAX_HISTORY_BYTES
from tilewright.server.http import bodies as bounded_body
from tilewright.server.http import connections
from tilewright.server.http import connections as limit
from tilewright.server.http.settings import MEDIA_LIMITS, ServerSettings
from tilewright.server.media import fetch, sources
from tilewright.server.media import gate as media
from tilewright.server.output.tools import MAX_TOOLS

DEFAULTS = {field.name: field.default for field in fields(ServerSettings)}
MIB, KIB = 1 << 20, 1 << 10
# The beginning of a row, and what its default must hold.
EXPECTED = {
    "of all clients": f"less {limit.RESERVED_FILES}, or half of it; at most {limit.MOST_CONNECTIONS:,}",
    "silence before": f"{DEFAULTS['head_timeout_s']:g} s, then {DEFAULTS['idle_timeout_s']:g} s",
    "time for the request line": f"{DEFAULTS['head_timeout_s']:g} s",
    "request line and headers together": f"{connections.MAX_HEAD_BYTES // KIB} KiB",
    "headers": str(connections.MAX_HEADERS),
    "one header": f"{connections.MAX_LINE_BYTES // KIB} KiB",
    "the address": f"{connections.MAX_LINE_BYTES // KIB} KiB",
    "a client that reads nothing": f"{DEFAULTS['write_timeout_s']:g} s",
    "bytes": f"{DEFAULTS['max_body_bytes'] // MIB} MiB",
    "commas": f"{bounded_body.MAX_BODY_VALUES:,}",
    "silence while": f"{DEFAULTS['body_timeout_s']:g} s, and at least {bounded_body.MIN_BYTES_PER_S // KIB} KiB",
    "all bodies": f"{DEFAULTS['max_held_bytes'] // MIB} MiB",
    "messages": f"{MAX_MESSAGES:,}",
    "keys and values": f"{MAX_VALUES:,}",
    "tools": str(MAX_TOOLS),
    "prompts of": str(bodies.MAX_PROMPTS),
    "stop texts": f"{bodies.MAX_STOPS}; {bodies.MAX_STOP_CHARACTERS:,}",
    "entries of `logit_bias`": f"{bodies.MAX_BIASES:,}",
    "a schema": f"{MAX_SOURCE_BYTES // MIB} MiB",
    "responses kept": f"{MAX_HISTORY_BYTES // MIB} MiB",
    "images, videos": str(MEDIA_LIMITS.max_items),
    "bytes of one": f"{MEDIA_LIMITS.max_bytes // MIB} MiB",
    "bytes of all": f"{MEDIA_LIMITS.max_total_bytes // MIB} MiB",
    "pixels": f"{MEDIA_LIMITS.max_pixels:,}",
    "frames": str(MEDIA_LIMITS.max_frames),
    "seconds": f"{MEDIA_LIMITS.max_duration_s:g}",
    "characters of a URL": f"{sources.MAX_SOURCE_LENGTH:,}",
    "time to fetch": f"{media.MediaPolicy().timeout_s:g} s, {media.MediaPolicy().max_redirects} redirects",
    "fetched at once": f"{fetch.MAX_CONNECTIONS}; {media._MAX_AT_ONCE}",
    "time to decode": f"{MEDIA_LIMITS.max_decode_s:g} s; 2 GiB",
    "waiting": str(DEFAULTS["max_queue"]),
    "time for one": f"{DEFAULTS['request_timeout_s']:g} s",
    "time to finish": f"{flags.DRAIN_S:g} s",
}


@pytest.fixture(scope="module")
def rows():
    section = (ROOT / "docs" / "server.md").read_text().split("## Bounds")[1].split("\n\nA text is refused")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line]
    return [row for row in cells if len(row) == 4 and row[1]][2:]


@pytest.mark.parametrize("beginning", EXPECTED)
def test_defaults(rows, beginning):
    first = next(row for row in rows if row[0].startswith(beginning))
    assert EXPECTED[beginning] in first[1], first


def test_flags_exist(rows):
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_arguments(commands)
    help_text = commands.choices["serve"].format_help()
    flags = {row[2].strip("`") for row in rows} - {""}
    assert len(flags) > 12 and not [flag for flag in flags if f"{flag} " not in help_text]
