"""All routes of the mirror's API, in the order of its document."""

from typing import Final

from bdn.mirror.api import contents, control, credentials, events, mirrors

ROUTERS: Final = (
    mirrors.router,
    contents.router,
    control.router,
    events.router,
    credentials.secrets_router,
    credentials.tokens_router,
    credentials.identity_router,
    control.probes_router,
)
