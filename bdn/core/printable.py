"""Makes text from outside, such as file names and messages of upstreams, safe for a terminal or a log."""

import json


def printable(text: str) -> str:
    """Put the text on one line, with unprintable characters escaped as in JSON.

    ``\\n``, ``\\u001b``, and also DEL, C1 controls, bidirectional controls and lone surrogates: all that
    ``str.isprintable`` excludes.
    """
    return (
        text if text.isprintable() else "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)
    )
