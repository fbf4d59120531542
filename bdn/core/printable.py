"""Makes text from outside, such as file names and messages of upstreams, safe for a terminal or a log."""

import json
import re


def printable(text: str) -> str:
    """Put the text on one line, with unprintable characters escaped as in JSON.

    ``\\n``, ``\\u001b``, and also DEL, C1 controls, bidirectional controls and lone surrogates: all that
    ``str.isprintable`` excludes.
    """
    return (
        text if text.isprintable() else "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in text)
    )


def shortened(text: str) -> str:
    """Put digests and commits in their shortest usual form."""
    return re.sub(r"\b(b3:[0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", text))
