"""The metrics at /metrics, in Prometheus' format. deploy/grafana.json plots them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tilewright.diffusion.requests import Result
from tilewright.server.link.backend import Ended

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

# Field of `engine.stats.Stats`, metric name, help text.
_ENGINE_GAUGES = (
    ("num_replicas", "replicas", "Engines that answer."),
    ("num_running", "requests_running", "Answers being computed."),
    ("num_waiting", "requests_waiting", "Answers that wait for their first step."),
    ("num_preparing", "requests_preparing", "Requests whose prompt is being prepared."),
    ("num_pages", "kv_pages", "Pages for keys and values."),
    ("num_pages_used", "kv_pages_used", "Pages that running answers hold."),
    ("num_window_pages", "kv_window_pages", "Pages of layers with a sliding window; 0: the model has none."),
    ("num_window_pages_used", "kv_window_pages_used", "Pages of windows that running answers hold."),
    ("weight_bytes", "weight_bytes", "Bytes of the model's weights as they are packed, on the first rank."),
    ("mapped_weight_bytes", "mapped_weight_bytes", "Of these, bytes mapped from the pack cache's file."),
    ("kv_bytes", "kv_bytes", "Bytes of all pages for keys and values; untouched ones take no memory."),
    ("kv_bytes_used", "kv_bytes_used", "Bytes of pages that running answers hold."),
    ("kv_bytes_touched", "kv_bytes_touched", "Bytes of pages that were written so far, prefix cache included."),
    ("scratch_bytes", "scratch_bytes", "Bytes for results of ops within a step."),
    ("resident_bytes", "engine_resident_bytes", "Bytes that the engine's process has in memory; 0: unknown."),
    ("resident_file_bytes", "engine_resident_file_bytes", "Of these, pages of files: libraries and mapped weights."),
    ("other_bytes", "engine_other_bytes", "Resident bytes that are no weights, keys and values, scratch or features."),
    ("feature_bytes", "feature_cache_bytes", "Bytes of cached features of images and videos."),
    (
        "num_cross_pages",
        "cross_attention_pages",
        "Pages for encoder states that tokens attend to; 0: the model has none.",
    ),
    ("num_cross_pages_used", "cross_attention_pages_used", "Pages of encoder states that running answers attend to."),
    ("num_state_slots", "state_slots", "Slots for states of recurrent layers; 0: the model has none."),
    ("num_state_slots_used", "state_slots_used", "Slots that running answers and their drafts hold."),
    ("num_state_snapshots", "state_snapshots", "Snapshots of recurrent states, for prompts with the same prefix."),
    (
        "prefix_hit_rate",
        "prefix_cache_hit_ratio",
        "Share of prompt tokens found in the prefix cache, since the start.",
    ),
    (
        "feature_hit_rate",
        "feature_cache_hit_ratio",
        "Share of media whose features were cached, since the start.",
    ),
    (
        "cross_hit_rate",
        "cross_attention_hit_ratio",
        "Share of images whose cross-attention keys and values were cached.",
    ),
    (
        "state_hit_rate",
        "state_cache_hit_ratio",
        "Share of admitted answers that started from a snapshot.",
    ),
    ("prompt_tokens_per_s", "prompt_tokens_per_second", "Prompt tokens computed, over the last 10 s."),
    ("output_tokens_per_s", "output_tokens_per_second", "Tokens generated, over the last 10 s."),
    (
        "read_share",
        "bandwidth_ratio",
        "Share of the machine's read bandwidth reached in the steps of the last 10 s.",
    ),
    (
        "gemm_share",
        "gemm_ratio",
        "Share of the machine's bf16 GEMM peak reached in the steps of the last 10 s.",
    ),
    ("read_limit_bytes_per_s", "bandwidth_bytes_per_second", "The machine's read bandwidth, measured at the start."),
    ("gemm_limit_flops_per_s", "gemm_flops_per_second", "The machine's bf16 GEMM peak, measured at the start."),
)
_ENGINE_COUNTERS = (
    ("num_prompt_tokens", "computed_prompt_tokens", "Prompt tokens computed, without those found in a cache."),
    ("num_steps", "steps", "Steps of the engine."),
    ("busy_s", "step_seconds", "Seconds spent in steps."),
    ("num_preemptions", "preemptions", "Answers preempted because pages ran out."),
    ("num_drafts_proposed", "draft_tokens", "Draft tokens proposed."),
    ("num_drafts_accepted", "accepted_draft_tokens", "Draft tokens accepted."),
)
# Field of `link.diffusion.DiffusionBackend.stats`, metric name, help text.
_DIFFUSION_GAUGES = (
    ("num_waiting", "pictures_waiting", "Requests for images and videos in the queue."),
    ("num_running", "pictures_running", "Requests for images and videos being made."),
    ("is_ready", "picture_worker_ready", "1 while the diffusion worker runs: from the first request on."),
)


class Metrics:
    """The server's metrics; the engine's are fetched for each scrape."""

    def __init__(self) -> None:
        disable_created_metrics()  # they would double the series of each counter
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, help_text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"tilewright_{name}", help_text, labels, buckets=buckets, registry=registry)

        def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"tilewright_{name}", help_text, labels, registry=registry)

        self._requests = counter("requests", "Requests by path and status.", ("path", "status"))
        self._seconds = histogram("request_seconds", "From the request to its last byte.", _SECONDS, ("path",))
        self.first_token = histogram("time_to_first_token_seconds", "From the request to its first token.", _SECONDS)
        self.between_tokens = histogram("inter_token_seconds", "Between two tokens of an answer.", _SECONDS)
        self._prompt_tokens = histogram("prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_tokens = histogram("output_tokens", "Tokens of a request's answers.", _TOKENS)
        self._cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.refused = counter("requests_refused", "Requests refused because the queue was full.")
        self.connections_refused = counter("connections_refused", "Connections closed because too many are open.")
        self.in_flight = Gauge("tilewright_requests_in_flight", "Requests being answered.", registry=registry)
        self._ready = Gauge("tilewright_engine_ready", "1 while the engine answers.", registry=registry)
        self._images = counter("pictures", "Images made.")
        self._videos = counter("videos", "Videos made.")
        self.generations_cancelled = counter("pictures_cancelled", "Requests for images or videos that were cancelled.")
        self._generation_seconds = histogram("picture_seconds", "Making what one request asks for.", _SECONDS)
        self._generation_step = histogram("picture_step_seconds", "A denoising step.", _SECONDS)
        self._engine = _EngineCollector()
        registry.register(self._engine)

    def count_request(self, path: str, status: int, total_s: float) -> None:
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(total_s)

    def count_tokens(self, ended: Ended) -> None:
        self._prompt_tokens.observe(ended.num_prompt_tokens)
        self._output_tokens.observe(ended.num_output_tokens)
        self._cached_tokens.inc(ended.num_cached_tokens)

    def count_result(self, result: Result, *, is_video: bool) -> None:
        (self._videos if is_video else self._images).inc(len(result.files))
        self._generation_seconds.observe(result.timings.total_s)
        for step_s in result.timings.steps_s:
            self._generation_step.observe(step_s)

    def text(
        self, engine: Mapping[str, float] | None, num_restarts: int, diffusion: Mapping[str, float] | None = None
    ) -> bytes:
        """Return all metrics; `engine` is None while no engine runs, `diffusion` None without a diffusion worker."""
        self._ready.set(engine is not None)
        self._engine.stats = dict(engine or {})
        self._engine.num_restarts = num_restarts
        self._engine.diffusion = dict(diffusion or {})
        return generate_latest(self._registry)


class _EngineCollector:
    """Exports the latest stats of the engine and the diffusion worker."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.num_restarts = 0
        self.diffusion: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        for name, metric, help_text in _ENGINE_GAUGES:
            if self.stats.get(name) is not None:
                yield GaugeMetricFamily(f"tilewright_{metric}", help_text, self.stats[name])
        for name, metric, help_text in _ENGINE_COUNTERS:
            if self.stats.get(name) is not None:
                yield CounterMetricFamily(f"tilewright_{metric}", help_text, self.stats[name])
        yield CounterMetricFamily("tilewright_engine_restarts", "Engine restarts.", self.num_restarts)
        for name, metric, help_text in _DIFFUSION_GAUGES:
            if name in self.diffusion:
                yield GaugeMetricFamily(f"tilewright_{metric}", help_text, self.diffusion[name])
        if "num_restarts" in self.diffusion:
            help_text = "Restarts of the diffusion worker."
            yield CounterMetricFamily("tilewright_picture_worker_restarts", help_text, self.diffusion["num_restarts"])
