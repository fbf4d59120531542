"""One small change each that makes ``bdn/store`` or ``bdn/transfer`` wrong: file, breakage, old, new."""

from __future__ import annotations

Breakage = tuple[str, str, str, str]

STORE: list[Breakage] = [
    (
        "store/directory.py",
        "the data of a chunk is not synced",
        "        os.fdatasync(descriptor)\n",
        "",
    ),
    (
        "store/directory.py",
        "the folder is not synced after the rename",
        "                raise\n            _sync_folder(target.parent)\n",
        "                raise\n",
    ),
    (
        "store/directory.py",
        "a new folder's parent is not synced",
        "        _sync_folder(folder.parent)\n",
        "",
    ),
    (
        "store/directory.py",
        "who finds a chunk does not sync its folder",
        "                _sync_folder(target.parent)  # whoever renamed it may not have come to this, or have failed in it\n",
        "",
    ),
    (
        "store/directory.py",
        "a chunk is written under its own name",
        'partial = self._incoming / f"{os.getpid()}-{self._nonce}-{next(self._numbers)}"',
        "partial = target; _make_folder(target.parent)",
    ),
    (
        "store/directory.py",
        "threads take names from one generator",
        "self._numbers = itertools.count()",
        "self._numbers = (os.urandom(4).hex() for _ in itertools.count())",
    ),
    (
        "store/directory.py",
        "what a failed put wrote is left behind",
        "                    partial.unlink()\n",
        "                    pass\n",
    ),
    (
        "store/directory.py",
        "a short write is taken for a whole one",
        "            view = view[os.write(descriptor, view) :]\n",
        "            os.write(descriptor, view); break\n",
    ),
    (
        "store/directory.py",
        "chunks can be written to",
        "os.O_CLOEXEC, 0o444)",
        "os.O_CLOEXEC, 0o644)",
    ),
    (
        "store/directory.py",
        "a failing delete raises the system's error",
        "        with self._failures_mapped():\n            (self._chunks / digest.fanout).unlink",
        "        if digest:\n            (self._chunks / digest.fanout).unlink",
    ),
    (
        "store/directory.py",
        "a store that is gone says NOT_FOUND",
        "                if not self._chunks.is_dir():\n",
        "                if digest is None:\n",
    ),
    (
        "store/memory.py",
        "an existing chunk is overwritten",
        "self._chunks.setdefault(digest, bytes(content))",
        "self._chunks[digest] = bytes(content)",
    ),
    (
        "store/memory.py",
        "the caller's buffer is kept instead of a copy",
        "bytes(content))",
        "content)  # type: ignore[arg-type]",
    ),
]

TRANSFER: list[Breakage] = [
    (
        "transfer/verifying.py",
        "a wrong chunk is believed",
        "if actual != digest:",
        "if actual == b'':",
    ),
    (
        "transfer/ranged.py",
        "a 200 is taken for the range",
        "    if status != 206:\n",
        "    if status not in (200, 206):\n",
    ),
    (
        "transfer/ranged.py",
        "Content-Range is not compared",
        "if stated is None or stated[0] != request.range:",
        "if stated is None:",
    ),
    (
        "transfer/ranged.py",
        "a file that shrank is tried again",
        "if stated is not None and stated[1] != request.size:",
        "if stated is not None and stated[0] == request.range and stated[1] != request.size:",
    ),
    (
        "transfer/ranged.py",
        "the ETag is not compared",
        "if location.etag is not None and",
        "if location.etag is None and",
    ),
    (
        "transfer/ranged.py",
        "a short body is data",
        "        if done != len(buffer):\n",
        "        if done > len(buffer):\n",
    ),
    (
        "transfer/ranged.py",
        "a body longer than the range is data",
        "if response.read(1):",
        "if response.read(1) and not buffer:",
    ),
    (
        "transfer/ranged.py",
        "a compressed body is data",
        'response.headers.get("Content-Encoding", "identity") != "identity" or ',
        "",
    ),
    (
        "transfer/ranged.py",
        "credentials follow a redirect to another origin",
        "if origin_of(urlsplit(target)) != origin_of(urlsplit(url)):",
        "if urlsplit(target).hostname != urlsplit(url).hostname:",
    ),
    (
        "transfer/ranged.py",
        "one redirect too many is followed",
        "_REDIRECT_LIMIT: Final = 5",
        "_REDIRECT_LIMIT: Final = 6",
    ),
    (
        "transfer/ranged.py",
        "403 is an outage",
        "if status in (401, 403):",
        "if status == 401:",
    ),
    (
        "transfer/ranged.py",
        "412 is an outage",
        "if status in (412, 416):",
        "if status == 416:",
    ),
    (
        "transfer/ranged.py",
        "a malformed redirect raises ValueError",
        "        except NETWORK_ERRORS as error:",
        "        except (OSError, http.client.HTTPException) as error:",
    ),
    (
        "transfer/connections.py",
        "messages repeat headers and addresses",
        "if isinstance(error, http.client.InvalidURL | ValueError) and not isinstance(error, OSError):",
        "if error is None:",
    ),
    (
        "transfer/connections.py",
        "a connection is kept after an unread answer",
        "keep = response.isclosed() and not response.will_close",
        "keep = True",
    ),
    (
        "transfer/connections.py",
        "no connection is kept",
        "keep = response.isclosed() and not response.will_close",
        "keep = False",
    ),
    (
        "transfer/connections.py",
        "a stale connection is not replaced",
        "                if not reused or self._is_closed:\n",
        "                if reused or self._is_closed:\n",
    ),
    (
        "transfer/connections.py",
        "the socket of a refusal stays open",
        "                response.close()  #",
        "                pass  #",
    ),
    (
        "transfer/connections.py",
        "closing turns a TLS body into ciphertext",
        "socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)",
        "connection.sock.shutdown(socket.SHUT_RDWR)",
    ),
    (
        "transfer/connections.py",
        "NO_PROXY is ignored",
        '"" if proxy_bypass(host) else getproxies()',
        "getproxies()",
    ),
    (
        "transfer/connections.py",
        "HTTPS_PROXY is ignored",
        "        if not proxy:\n",
        "        if True:\n",
    ),
    (
        "transfer/connections.py",
        "certificates are not verified",
        "ssl.create_default_context()",
        "ssl._create_unverified_context()",
    ),
    (
        "transfer/http_chunks.py",
        "the grant goes to the store",
        "                        headers = {}\n",
        "                        headers = dict(headers)\n",
    ),
    (
        "transfer/http_chunks.py",
        "a longer chunk is read",
        "if length != str(len(buffer)):",
        "if length is None or int(length) < len(buffer):",
    ),
    (
        "transfer/buffers.py",
        "a buffer is lost when its user fails",
        "            yield buffer[:size]\n        finally:\n            self._free.put(buffer)",
        "            yield buffer[:size]\n            self._free.put(buffer)\n        finally:\n            pass",
    ),
    (
        "transfer/buffers.py",
        "buffers are not aligned",
        "memoryview(mmap.mmap(-1, CHUNK_SIZE))",
        "memoryview(bytearray(CHUNK_SIZE + 8))[8:]",
    ),
    (
        "transfer/byte_threads.py",
        "cancelling leaves the thread behind",
        "                    await _ended(waiter)\n",
        "                    pass\n",
    ),
    (
        "transfer/byte_threads.py",
        "cancelling twice leaves the thread behind",
        "    while not waiter.done():\n        with contextlib.suppress(asyncio.CancelledError):\n            await",
        "    if not waiter.done():\n        with contextlib.nullcontext():\n            await",
    ),
    (
        "transfer/retrying.py",
        "a backoff does not hear that it is stopped",
        "            if self.stop.is_set():\n",
        "            if failures < 0:\n",
    ),
    (
        "transfer/retrying.py",
        "a wrong chunk is not read once more",
        "            except ChecksumMismatchError:\n                self.inner.read_into(digest, buffer)\n",
        "            except ChecksumMismatchError:\n                raise\n",
    ),
    (
        "transfer/checksums.py",
        "a git blob is hashed without its size",
        'hashlib.sha1(b"blob %d\\0" % size, usedforsecurity=False)',
        'hashlib.sha1(b"blob \\0", usedforsecurity=False)',
    ),
    (
        "transfer/checksums.py",
        "a wrong checksum passes",
        "if actual != self._expected.hex:",
        "if not actual:",
    ),
    (
        "wire/retry_after.py",
        "a date that is none raises ValueError",
        "    except ValueError:\n",
        "    except KeyError:\n",
    ),
    (
        "wire/retry_after.py",
        "the hub's wait is taken from another window",
        "[^,]*",
        ".*",
    ),
]
