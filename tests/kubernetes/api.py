"""The API server, as its administrator: objects are documents of JSON."""

# ruff: noqa: ASYNC110 - a cluster of other processes: there is nothing to be notified by

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx2
import yaml

Json = dict[str, Any]
LONGEST_SECONDS: Final = 400.0  # more than the longest journey
_PLURALS: Final = {"PersistentVolume": "persistentvolumes", "PersistentVolumeClaim": "persistentvolumeclaims"}
_OF_THE_CLUSTER: Final = ("Namespace", "PersistentVolume")


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while not await condition():
            await asyncio.sleep(0.3)


class Api:
    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        trusted = ssl.create_default_context(cafile=cluster["certificate-authority"])
        headers = {"Authorization": f"Bearer {user['token']}"}
        self._http = httpx2.AsyncClient(
            base_url=cluster["server"], headers=headers, verify=trusted, trust_env=False, timeout=30
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, at)

    async def get(self, path: str, **params: str) -> Json:
        return dict((await self._http.get(path, params=params)).raise_for_status().json())

    async def text(self, path: str, **params: str) -> str:
        """An empty text while the kubelet cannot answer, such as for a container that has not started."""
        answer = await self._http.get(path, params=params)
        return answer.text if answer.is_success else ""

    async def create(self, document: Json) -> None:
        kind = document["kind"]
        plural = _PLURALS.get(kind, f"{kind.lower()}s")
        namespace = document["metadata"].get("namespace", "default")
        place = "" if kind in _OF_THE_CLUSTER else f"/namespaces/{namespace}"
        (await self._http.post(f"/api/v1{place}/{plural}", json=document)).raise_for_status()

    async def delete_pod(self, name: str, namespace: str = "default") -> None:
        (await self._http.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")).raise_for_status()

    async def pods(self, namespace: str = "default", **params: str) -> list[Json]:
        return list((await self.get(f"/api/v1/namespaces/{namespace}/pods", **params))["items"])

    async def pod(self, name: str, namespace: str = "default") -> Json:
        return await self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def log(self, name: str, container: str, namespace: str = "default") -> str:
        return await self.text(f"/api/v1/namespaces/{namespace}/pods/{name}/log", container=container)

    async def events(self, name: str, namespace: str = "default") -> list[str]:
        """What ``kubectl describe pod`` shows."""
        chosen = f"involvedObject.name={name}"
        found = await self.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=chosen)
        return [event["message"] for event in found["items"]]
