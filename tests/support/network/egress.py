"""The guard's policy where upstreams are servers that a test starts itself."""

from typing import Final

from bdn.core.egress import EgressPolicy

ALLOW_LOOPBACK: Final = "127.0.0.1, ::1, localhost"  # for BDN_EGRESS_ALLOW
LOOPBACK: Final = EgressPolicy.parse(ALLOW_LOOPBACK)
