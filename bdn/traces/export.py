"""The exporter of a service: from its start to its stop."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.traces.spans import active

_STOP_SECONDS: Final = 2.0  # for the last spans when a service stops


@asynccontextmanager
async def exporting(endpoint: str | None, service: str, **facts: str) -> AsyncIterator[None]:
    """Export the spans of this process to the collector at ``endpoint`` until the block ends; None: no spans.

    ``service`` is its ``service.name``, unless ``OTEL_SERVICE_NAME`` is set; ``facts`` describe the process.

    Raises ``InvalidRequestError``: the SDK is not installed.
    """
    if endpoint is None:
        yield
        return
    try:
        from bdn.traces.otlp import OtlpTracer  # noqa: PLC0415 - an extra, which most do not install
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"BDN_OTLP_ENDPOINT needs the OpenTelemetry SDK ({error}): install bdn[traces], or unset the setting"
        ) from error
    tracer = await asyncio.to_thread(OtlpTracer, endpoint, service, facts)
    try:
        with active(tracer):
            yield
    finally:
        # A daemon thread: a collector that does not answer would delay the stop by its timeout of 10 s.
        ending = threading.Thread(target=tracer.close, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _STOP_SECONDS)
