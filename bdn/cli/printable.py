"""Makes text from outside, such as file names and messages of upstreams, safe for a terminal or a log."""

import json


def printable(text: str) -> str:
    """The text on one line; a sign that a terminal would act on, or that shows as nothing, as JSON escapes it.

    ``\\n``, ``\\u001b``, and also DEL, C1 controls, bidirectional controls and lone surrogates: all that ``str.isprintable`` excludes.
    """
    return (
        text if text.isprintable() else "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)
    )
