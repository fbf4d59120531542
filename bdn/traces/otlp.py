"""The OpenTelemetry SDK behind ``bdn.traces.spans``: spans are batched in memory and sent by a thread of their own."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import bdn
from bdn.traces.spans import NO_SPAN, Span, Value

_MOST_SPANS: Final = 500  # per request, mirror or stage, in this process
_LONGEST_VALUE: Final = 500  # characters; names of sources and jobs are the caller's
_PARENT: Final = "traceparent"
_FORMAT: Final = TraceContextTextMapPropagator()

logger = logging.getLogger(__name__)


@dataclass
class _Budget:
    left: int = _MOST_SPANS
    refused: int = 0

    def take(self) -> bool:
        self.left -= 1
        self.refused += self.left < 0
        return self.left >= 0


_BUDGET: Final[ContextVar[_Budget | None]] = ContextVar("_BUDGET", default=None)


class OtlpTracer:
    """Of this process. Blocking: the SDK may look for facts of the machine.

    Sampling, headers, timeouts and queue sizes are the SDK's own variables: ``OTEL_TRACES_SAMPLER`` and others.
    """

    def __init__(self, endpoint: str, service: str, facts: Mapping[str, str]) -> None:
        facts = {f"bdn.{name}": value for name, value in facts.items()}
        ours = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: bdn.__version__, **facts})
        resource = ours.merge(OTELResourceDetector().detect())  # the operator's names win
        limits = SpanLimits(max_span_attribute_length=_LONGEST_VALUE)
        self._exporter = _WarningExporter(endpoint)
        self._provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("bdn", bdn.__version__)
        # From here on the SDK logs only each failure of the collector, again and again.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        """Send what is left, unless the collector is known not to answer. Blocking, up to the exporter's timeout."""
        if self._exporter.is_failing:
            self._exporter.shutdown()
        self._provider.shutdown()

    @contextmanager
    def span(
        self, name: str, attributes: dict[str, Value], *, parent: str | None, is_entry: bool, is_request: bool
    ) -> Iterator[Span]:
        budget = _BUDGET.get()
        if is_entry or budget is None:
            budget, is_entry = _Budget(), True
        if not budget.take():
            yield NO_SPAN
            return
        # Only ``traceparent``: what a caller writes into ``tracestate`` and ``baggage`` is not passed on.
        context = None if parent is None else _FORMAT.extract({_PARENT: parent}, get_current())
        kind = trace.SpanKind.SERVER if is_request else trace.SpanKind.INTERNAL
        begun = self._tracer.start_span(name, context, kind, _named(attributes))
        before = _BUDGET.set(budget)
        try:
            with trace.use_span(begun, record_exception=False, set_status_on_exception=False):
                yield _OtlpSpan(begun)
        except BaseException as error:
            begun.set_status(trace.StatusCode.ERROR)
            begun.set_attribute("error.type", str(getattr(error, "code", type(error).__name__)))
            raise
        finally:
            _BUDGET.reset(before)
            if is_entry and budget.refused:
                begun.set_attribute("bdn.spans_left_out", budget.refused)
            begun.end()

    def record(self, name: str, began: int, attributes: dict[str, Value]) -> None:
        budget = _BUDGET.get()
        if budget is not None and budget.take():
            self._tracer.start_span(name, attributes=_named(attributes), start_time=began).end()

    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        _FORMAT.inject(carrier)
        return carrier.get(_PARENT)


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"bdn.{name}": value for name, value in attributes.items()}


class _OtlpSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))


class _WarningExporter(SpanExporter):
    """Logs one warning per outage of the collector, and one line at its end. Spans of an outage are dropped."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._inner = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self.is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        is_failure = result is not SpanExportResult.SUCCESS
        if is_failure and not self.is_failing:
            logger.warning(
                "collector at BDN_OTLP_ENDPOINT=%s takes no spans; they are dropped until it does", self._endpoint
            )
        elif self.is_failing and not is_failure:
            logger.info("collector at BDN_OTLP_ENDPOINT=%s takes spans again", self._endpoint)
        self.is_failing = is_failure
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]
