"""The engine process: reads requests from a socket, writes the events of each step."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tilewright.engine_flags import make_engine
from tilewright.inputs.media import MediaLimits
from tilewright.server.link import wire
from tilewright.server.link.outbox import Outbox
from tilewright.server.link.process import KNOWN_LIMITS, Channel, run_process
from tilewright.server.link.service import EngineService
from tilewright.types import RequestError

# Measures the machine's limits, which /metrics compares the engine with: 0.7 s of the start, buffers included. An
# engine that takes the place of another gets what was measured in its options, by the name of KNOWN_LIMITS.
MEASURE_S = 0.2


def serve(channel: Channel, options: dict[str, Any]) -> None:
    """Serves requests until the other end closes."""
    from tilewright import machine

    known_limits = options.pop(KNOWN_LIMITS, None)
    try:
        engine = make_engine(**{**options, "media_limits": MediaLimits(**options["media_limits"])})
    except RequestError as error:
        channel.send({"refused": str(error)})
        return
    outbox = Outbox(lambda events: channel.send({"events": [[id, wire.event_to_json(event)] for id, event in events]}))
    engine.loop.after_step = outbox.flush
    if known_limits is None:
        measured = machine.measure(MEASURE_S)
        gemm_tflops = measured.fp32_tflops if options.get("dtype") == "float32" else measured.bf16_tflops
        known_limits = (measured.read_gb_s * 1e9, gemm_tflops * 1e12)
    service = EngineService(engine, outbox.put, known_limits)
    with engine:
        channel.send({"ready": dataclasses.asdict(service.model()), KNOWN_LIMITS: known_limits})
        while (message := channel.receive()) is not None:
            _handle(message, service, channel)
            outbox.flush()


def _handle(message: dict[str, Any], service: EngineService, channel: Channel) -> None:
    if "submit" in message:
        service.submit(message["submit"], wire.request_from_json(message["request"]))
    elif "abort" in message:
        service.abort(message["abort"])
    elif "stats" in message:
        channel.send({"stats": message["stats"], "values": service.stats()})
    else:
        raise ValueError(f"unknown message with {sorted(message)}")


if __name__ == "__main__":
    sys.exit(run_process(int(sys.argv[1]), serve))
