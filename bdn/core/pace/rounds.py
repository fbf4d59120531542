"""When what is done in rounds, such as reading everything again, is to be done anew."""


def is_round_due(began: float | None, period_seconds: float, now: float) -> bool:
    """Whether a round is to begin now. ``began`` is of the newest, which has ended; None when there was none. Period 0 is never.

    It begins a period after the one before it began. So whatever goes wrong is found within a period, unless a round takes
    longer than that; then the next one begins at once. A clock that was set back is no reason to wait for years.
    """
    if not period_seconds:
        return False
    return began is None or not began <= now < began + period_seconds
