"""What holds for all tests.

How long Hypothesis looks: ``default`` is the same short search every time; ``HYPOTHESIS_PROFILE=nightly`` is a long new one. Neither
has a deadline: how long an example takes says nothing about the code on a machine that others use.
"""

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.support.network.authority import new_authority
from tests.support.promises.tally import (  # noqa: F401 - hooks and fixtures
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_terminal_summary,
    tally,
)

pytest_plugins = ("tests.support.mirror.backends",)

settings.register_profile("default", derandomize=True, database=None, deadline=None, max_examples=200)
settings.register_profile("nightly", deadline=None, max_examples=10_000, stateful_step_count=100, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell starts what runs in its background with Ctrl-C ignored, and so would be the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Eight thousand tests are made, and none of them is in a cycle: the collector looks at them neither now nor ever."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No settings, credentials or proxies of the machine's, and one authority, which signed nothing.

    Loading the system's hundreds of authorities is most of what a client costs.
    """
    folder = tmp_path_factory.mktemp("authority")
    certificates = str(new_authority(folder, "localhost").certificates)
    with pytest.MonkeyPatch.context() as environment:
        for name in os.environ:
            is_setting = name.startswith(("BDN_", "AWS_", "HF_", "XDG_DATA")) and not name.startswith("BDN_TEST_")
            if is_setting or name.upper().endswith("_PROXY"):
                environment.delenv(name)
        for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
            environment.setenv(name, certificates)
        (folder / "none").mkdir()
        environment.setenv("SSL_CERT_DIR", str(folder / "none"))
        yield
