"""What can go wrong between one of our services and its client, and neither of them said."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.errors import ServiceError


@dataclass(eq=False)
class ServiceUnreachableError(ServiceError):
    """No answer at all from one of our services."""

    code = "STORE_UNAVAILABLE"
    transient = True
    address: str
    reason: str

    def __str__(self) -> str:
        return f"no answer from {self.address} ({self.reason}); is the service running there?"


@dataclass(eq=False)
class WrongDocumentError(ServiceError):
    """An answer is not what its name says: it was damaged on its way, belongs to another request, or was wrong where it lay.

    Only the last does not pass by asking again.
    """

    code = "CHECKSUM_MISMATCH"
    transient = True
    document: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.document} is wrong as it came from {self.address}: {self.reason}"
