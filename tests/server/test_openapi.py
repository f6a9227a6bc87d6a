"""Requests made up from our own OpenAPI document, and around it: no answer is the server's own fault."""

import hypothesis
import pytest
import schemathesis
from conftest import ScriptedBackend, serving
from fuzzing import num_cases
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from tilewright.engine.engine import Engine
from tilewright.server.api.handler import ApiHandler
from tilewright.server.http.app import create_app
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.remote import LocalBackend

schema = schemathesis.openapi.from_dict(create_app(ApiHandler(ServerSettings(), [ScriptedBackend()])).openapi())
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def url(chat_folder):
    # A short context, so that an answer nobody bounds ends soon.
    with Engine(chat_folder, pack_cache=False, kv_memory="64MB", max_context=160) as engine:
        with serving(lambda: LocalBackend(engine)) as running:
            yield running.url
        assert engine.stats().num_pages_used == 0


@schema.parametrize()
@hypothesis.settings(
    max_examples=num_cases(100), deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_breaks_the_server(case, url):
    case.call_and_validate(base_url=url, checks=[not_a_server_error])
