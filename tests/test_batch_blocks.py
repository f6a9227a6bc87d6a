"""A batch over several workers, without Ray: places of requests, blocks of them, and answers that come twice."""

import json

import numpy as np
import pytest
from tiny_checkpoint import write_text_model

from tilewright.batch.ray_data import BLOCKS_AT_ONCE, BlockWriter, _known, num_per_block
from tilewright.batch.requests import LinePlace, RequestFile, read_request
from tilewright.batch.results import record
from tilewright.batch.work import BatchWorker, Totals, WorkerSettings
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError

URLS = ["/v1/completions"]


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "in.jsonl"
    bodies = [{"prompt": f"Count from {number}", "max_tokens": 4, "temperature": 0} for number in range(10)]
    bodies[7]["temperature"] = 9
    lines = [
        {"custom_id": f"n{number}", "method": "POST", "url": URLS[0], "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with RequestFile(path, URLS, 10_000) as file:
        yield file


def block_of(requests, numbers):
    """The block that a worker makes of these requests."""
    lines = [json.dumps(record(f"n{number}", "id", "req", 400 if number == 7 else 200, {})) for number in numbers]
    return {
        "number": np.array(numbers),
        "line": np.array([line.encode() for line in lines], dtype=object),
        "num_prompt_tokens": np.full(len(numbers), 3),
        "num_output_tokens": np.full(len(numbers), 5),
    }


def test_answers_that_come_twice_are_written_once(requests):
    lines, totals = [], Totals()
    writer = BlockWriter(requests, lines.append, totals)
    writer.write(block_of(requests, [0, 1, 2]))
    writer.write(block_of(requests, [2, 7]))  # computed again, as its worker was lost
    writer.write(block_of(requests, [0, 1, 2]))
    assert [line["custom_id"] for line in lines] == ["n0", "n1", "n2", "n7"]
    assert totals == Totals(num_answered=3, num_failed=1, num_prompt_tokens=12, num_output_tokens=20)
    assert requests.num_done == 4


def test_requests_of_an_earlier_run_are_not_sent(requests):
    done = {place.number: place for place in requests.places_left()}
    first = RequestFile(requests.path, URLS, 10_000)
    first.mark_done("n3", f"batch_req_{done[3].fingerprint:016x}")
    assert [place.number for place in first.places_left()] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    lines = []
    BlockWriter(first, lines.append, Totals()).write(block_of(first, [3, 4]))
    assert [line["custom_id"] for line in lines] == ["n4"]


def test_a_request_is_read_at_its_place(requests):
    places = list(requests.places_left())
    with requests.path.open("rb") as file:
        assert read_request(file, places[4], URLS, 10_000).custom_id == "n4"
        with pytest.raises(RequestError, match="has changed since it was checked"):
            read_request(file, places[4]._replace(offset=places[5].offset), URLS, 10_000)


@pytest.mark.parametrize("num_requests", [1, 7, 40, 1000, 10**6])
@pytest.mark.parametrize("num_workers", [1, 2, 64])
def test_blocks_keep_all_workers_busy(num_requests, num_workers):
    size = num_per_block(num_requests, num_workers, 128)
    assert 1 <= size <= 128 // BLOCKS_AT_ONCE
    assert size == 1 or -(-num_requests // size) >= 2 * num_workers


def test_a_worker_answers_a_block_as_the_server_does(requests, tmp_path):
    model = str(write_text_model(tmp_path / "text"))
    engine = {"model": model, "pack_cache": False, "max_context": 256, "kv_memory": "20MB"}
    limits = MediaLimits(allow_paths=False)
    worker = BatchWorker(WorkerSettings(engine, "mine", requests.path, 10_000, limits, False, 1, 1))
    places = list(requests.places_left())
    block = {name: np.array([getattr(place, name) for place in places], np.uint64) for name in LinePlace._fields}
    lines, totals = [], Totals()
    BlockWriter(requests, lines.append, totals).write(worker(block))
    worker.close()
    assert totals.num_answered == 9 and totals.num_failed == 1 and totals.num_output_tokens == 36
    assert [line["custom_id"] for line in lines] == [f"n{number}" for number in range(10)]
    assert {line["response"]["body"].get("model") for line in lines} == {"mine", None}
    assert "temperature" in lines[7]["response"]["body"]["error"]["message"]


def test_errors_that_ray_wraps_are_found():
    wrapped = RuntimeError("ray::MapWorker failed\n  in __init__\ntilewright.types.RequestError: no such model\n")
    known = _known(wrapped)
    assert isinstance(known, RequestError) and str(known) == "no such model"
    assert str(_known(RuntimeError("The actor died.\nmore"))) == "The actor died."
