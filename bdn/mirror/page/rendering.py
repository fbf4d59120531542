"""Templates of the page, and how they write numbers, times and names from outside."""

from collections.abc import Callable, Mapping
from datetime import datetime
from hashlib import blake2b
from importlib.resources import files
from typing import Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import bdn
from bdn.core.printable import printable, shortened
from bdn.core.units import counted, format_duration, format_size, format_time
from bdn.wire.shapes import moment

_SHOWN: Final = 200  # characters of a name
_LONGEST_SENTENCE: Final = 1000
_ASSETS: Final = {
    "page.css": "text/css; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "hx-sse.min.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PATHS: Final = {  # of views and forms, also of those that another module answers
    "now": "/ui",
    "cluster": "/ui/cluster",
    "node": "/ui/node",
    "mirrors": "/ui/mirrors",
    "mirror": "/ui/mirror",
    "model": "/ui/model",
    "jobs": "/ui/jobs",
    "job": "/ui/job",
    "eviction": "/ui/eviction",
    "prefetch": "/ui/prefetch",
    "search": "/ui/search",
    "login": "/ui/login",
    "logout": "/ui/logout",
}


class Assets:
    """The files of the package that pages refer to; the address of each has the digest of its content."""

    def __init__(self) -> None:
        folder = files("bdn.mirror.page") / "assets"
        self.files = {name: ((folder / name).read_bytes(), kind) for name, kind in _ASSETS.items()}

    def address(self, name: str) -> str:
        content, _ = self.files[name]
        return f"/ui/assets/{name}?v={blake2b(content, digest_size=8).hexdigest()}"


def path_of(view: str, **asked: str) -> str:
    """The address of a view, with its query."""
    query = urlencode({name: value for name, value in asked.items() if value}, errors="surrogatepass")
    return f"{PATHS[view]}?{query}" if query else PATHS[view]


def shown(text: str) -> str:
    """A name from outside on one line, without its middle if it is long, and without characters that hide or turn text."""
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 4 :]}"
    return printable(text)


def _named(text: str) -> Markup:
    """``shown``, in an element of its own direction."""
    return Markup("<bdi>{}</bdi>").format(shown(text))


def _sentence(text: str) -> str:
    """A sentence with names from outside in it: longer than a name, and with digests in their short form."""
    return printable(shortened(text[:_LONGEST_SENTENCE]))


def percent(part: int, whole: int) -> int:
    """0 to 100, also of numbers that an agent made up."""
    return max(0, min(100, round(100 * part / whole))) if whole > 0 else 0


def _clock(at: float) -> str:
    return f"{moment(at):%H:%M:%S}"


def _when(at: datetime) -> Markup:
    text = format_time(at.timestamp())
    return Markup('<time datetime="{}">{}</time>').format(f"{at:%Y-%m-%dT%H:%M:%SZ}", text)


class Templates:
    def __init__(self, assets: Assets) -> None:
        self._environment = Environment(
            loader=PackageLoader("bdn.mirror.page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            size=format_size,
            duration=format_duration,
            named=_named,
            shown=shown,
            sentence=_sentence,
            printable=printable,
            when=_when,
            clock=_clock,
            counted=counted,
        )
        self._environment.globals.update(
            asset=assets.address, path=path_of, percent=percent, version=bdn.__version__, min=min
        )

    def page(self, template: str, context: Mapping[str, object]) -> str:
        return self._environment.get_template(template).render(context)

    def macros(self, template: str) -> "Macros":
        return Macros(self._environment.get_template(template))


class Macros:
    """The macros of a template, as methods that return HTML as plain text."""

    def __init__(self, template: Template) -> None:
        self._module = template.module

    def __getattr__(self, name: str) -> Callable[..., str]:
        macro = getattr(self._module, name)
        return lambda *arguments: str(macro(*arguments))
