"""promtool and Prometheus: on the PATH, or where ``make prometheus`` unpacks Debian's package."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import yaml

from tests.support.network.ports import free_port
from tests.support.services.commands import ROOT, wait_until

RULES: Final = ROOT / "deploy/prometheus/rules.yml"
_PATH: Final = f"{os.environ['PATH']}:{ROOT / '.prometheus/usr/bin'}"
PROMTOOL: Final = shutil.which("promtool", path=_PATH)
PROMETHEUS: Final = shutil.which("prometheus", path=_PATH)
needs_promtool: Final = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; make prometheus unpacks it"
)
needs_prometheus: Final = pytest.mark.skipif(
    PROMETHEUS is None, reason="Prometheus is not installed; make prometheus unpacks it"
)


def promtool(*arguments: str, given: str = "") -> tuple[int, str]:
    """Its exit code, and its output and errors."""
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *arguments], input=given, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@contextmanager
def prometheus(folder: Path, targets: dict[str, dict[str, str]], rules: Path) -> Iterator[httpx2.Client]:
    """A server that scrapes and evaluates each second, and a client of its API.

    ``targets`` are addresses by instance by job.
    """
    assert PROMETHEUS is not None
    jobs = [
        {
            "job_name": job,
            "static_configs": [{"targets": [at], "labels": {"instance": name}} for name, at in some.items()],
        }
        for job, some in targets.items()
    ]
    paces = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": paces, "rule_files": [str(rules)], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (
        (folder / "prometheus.log").open("wb") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process,
    ):
        try:
            with httpx2.Client(base_url=f"http://{address}/api/v1", trust_env=False, timeout=60) as http:
                wait_until(lambda: _answers(http), what="Prometheus")
                yield http
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/query", params={"query": "1"}).is_success
    except httpx2.TransportError:
        return False


def found(http: httpx2.Client, query: str) -> list[tuple[dict[str, str], float]]:
    """The labels and values of an instant query."""
    answer: Any = http.get("/query", params={"query": query}).raise_for_status().json()
    return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]
