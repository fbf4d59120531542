"""Fit a line to points of which each rank has its own part. The ranks meet at ``BT_LEADER_ADDR``."""

import json
import os
import socket
import time
from collections.abc import Sequence
from io import TextIOWrapper

RANK, SIZE = int(os.environ["BT_NODE_RANK"]), int(os.environ["BT_GROUP_SIZE"])
LEADER = os.environ["BT_LEADER_ADDR"]
# Jobs of one machine share its network: the ranks of a job agree on a port that hardly any other job has.
PORT = 20_000 + int(os.environ["BT_TRAINING_JOB_ID"], 36) % 9_000
WAIT_SECONDS = 60
STEPS, RATE = 400, 0.3

POINTS = [(x / 10, (x / 10) ** 2) for x in range(20)]


class Group:
    """All ranks: the leader has a connection to each of the others, and they have one to the leader."""

    def __init__(self) -> None:
        connections = accepted() if RANK == 0 else [connected()]
        self.others: list[TextIOWrapper] = [one.makefile("rw") for one in connections]

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of what all ranks pass, the same for each of them."""
        if RANK == 0:
            rows = [values, *(json.loads(other.readline()) for other in self.others)]
            values = [sum(column) / SIZE for column in zip(*rows, strict=True)]
        for other in self.others:
            other.write(f"{json.dumps(list(values))}\n")
            other.flush()
        return list(values) if RANK == 0 else list(json.loads(self.others[0].readline()))


def accepted() -> list[socket.socket]:
    """One connection of each other rank."""
    with socket.create_server(("", PORT)) as server:
        server.settimeout(WAIT_SECONDS)
        return [server.accept()[0] for _ in range(SIZE - 1)]


def connected() -> socket.socket:
    """To the leader, which may start a moment later."""
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return socket.create_connection((LEADER, PORT), timeout=WAIT_SECONDS)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main() -> None:
    """Gradient descent on this rank's points, with the gradients of all ranks."""
    group = Group()
    mine = POINTS[RANK * len(POINTS) // SIZE : (RANK + 1) * len(POINTS) // SIZE]
    print(f"rank {RANK} of {SIZE} has the points from x = {mine[0][0]} to {mine[-1][0]}", flush=True)
    slope = intercept = 0.0
    for _ in range(STEPS):
        errors = [(x, slope * x + intercept - y) for x, y in mine]
        own = [sum(error * x for x, error in errors) / len(mine), sum(error for _, error in errors) / len(mine)]
        change = group.mean(own)
        slope, intercept = slope - RATE * change[0], intercept - RATE * change[1]
    print(f"rank {RANK}: y = {slope:.3f} x {intercept:+.3f}")


main()
