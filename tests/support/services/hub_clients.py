"""Calls of the hub's real clients, in a process of their own, against any endpoint.

As a script it needs nothing but the clients: it reads a list of calls from standard input and prints one line of JSON with all
results. What differs between two endpoints that say the same (addresses, request ids) is removed from errors.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
FRAMEWORKS: Final = ROOT / ".venv-training/bin/python"
MARK: Final = "RESULTS "
TRUSTED: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")  # loading the system's takes long
LONGEST_SECONDS: Final = 600
Call = tuple[str, Mapping[str, Any]]
Result = Any


# --- in the tests: starts the script ---


@dataclass(frozen=True)
class HubUser:
    """A user with a home of their own below ``home``; ``token`` is what HF_TOKEN says."""

    endpoint: str
    home: Path
    token: str | None = None
    is_xet: bool = False
    python: Path = Path(sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        self.home.mkdir(parents=True, exist_ok=True)
        return {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DOWNLOAD_TIMEOUT": "600",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_XET": "0" if self.is_xet else "1",
            **({"HF_TOKEN": self.token} if self.token else {}),
            **{name: os.environ[name] for name in TRUSTED if name in os.environ},
        }

    def run(self, calls: Sequence[Call]) -> list[Result]:
        """The result of each call, in order: a document, or ``{"error": …}``."""
        done = subprocess.run(
            [str(self.python), __file__],
            input=json.dumps(calls).encode(),
            capture_output=True,
            env=self.environment,
            cwd=self.home,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith(MARK)]
        assert len(lines) == 1, done.stdout.decode() + done.stderr.decode()
        results: list[Result] = json.loads(lines[0].removeprefix(MARK))
        return results

    def call(self, name: str, **options: Any) -> Result:
        [result] = self.run([(name, options)])
        return result


def python_with(*modules: str) -> Path | None:
    """An interpreter of these tests that has the modules: this one, or the one with the frameworks."""
    for python in (Path(sys.executable), FRAMEWORKS):
        if python.exists():
            found = subprocess.run([str(python), "-c", f"import {','.join(modules)}"], capture_output=True, check=False)
            if found.returncode == 0:
                return python
    return None


# --- in the process: the calls ---


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_below(folder: str | Path) -> dict[str, str]:
    """SHA-256 by relative path, links followed."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in sorted(paths)}


def snapshot(**options: Any) -> Result:
    from huggingface_hub import snapshot_download

    found = Path(snapshot_download(**options))
    return {"commit": found.name, "files": files_below(found)}


def snapshot_again(**options: Any) -> Result:
    """The second call finds everything in the cache, offline."""
    from huggingface_hub import snapshot_download

    snapshot_download(**options)
    found = Path(snapshot_download(**options, local_files_only=True))
    return {"commit": found.name, "files": files_below(found)}


def local_folder(**options: Any) -> Result:
    from huggingface_hub import snapshot_download

    place = Path(options.pop("cache_dir")) / "local"
    snapshot_download(**options, local_dir=place)
    return {path: found for path, found in files_below(place).items() if not path.startswith(".cache/")}


def file(**options: Any) -> Result:
    from huggingface_hub import hf_hub_download

    found = Path(hf_hub_download(**options))
    cache = Path(options["cache_dir"])
    blob = found.resolve().name
    absent = [str(path.relative_to(cache)) for path in cache.rglob(".no_exist/*/*")]
    return {"path": str(found.relative_to(cache)), "etag": blob, "sha256": digest(found.read_bytes()), "absent": absent}


def remembered_absence(**options: Any) -> Result:
    """That a file is missing is remembered below ``.no_exist`` where the 404 names the commit."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cache = Path(options["cache_dir"])
    try:
        hf_hub_download(**options)
    except EntryNotFoundError as error:
        absent = [str(path.relative_to(cache)) for path in cache.rglob(".no_exist/*/*")]
        return {"class": type(error).__name__, "absent": absent}
    return "found"


def command(*, arguments: Sequence[str], cache_dir: str) -> Result:
    """``hf ARGUMENTS --quiet``; where it prints a folder, what is in there."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hf"), *arguments, "--quiet"],
        capture_output=True,
        env={**os.environ, "HF_HUB_CACHE": cache_dir, "NO_COLOR": "1"},
        check=False,
        text=True,
    )
    said = done.stdout.strip()
    place = Path(said)
    if done.returncode == 0 and place.is_absolute() and place.is_dir():
        return {"code": 0, "commit": place.name, "files": files_below(place)}
    return {"code": done.returncode, "out": said, "err": done.stderr.strip()}


def api(method: str, *, cache_dir: str, **options: Any) -> Result:
    """A method of HfApi, with what it returns but for xet, the endpoint and git's names of folders, which no client reads."""
    from huggingface_hub import HfApi

    found = getattr(HfApi(), method)(**options)
    return shown(list(found) if method in {"list_repo_tree", "get_repo_discussions"} else found)


def shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): shown(one) for name, one in value.items() if "xet" not in name and name != "tree_id"}
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "__dict__"):
        return {"is": type(value).__name__, **shown({k: v for k, v in vars(value).items() if k != "endpoint"})}
    return str(value)


def metadata(**options: Any) -> Result:
    """What a HEAD says of a file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    options.pop("cache_dir")
    found = get_hf_file_metadata(hf_hub_url(**options))
    return {"commit": found.commit_hash, "etag": found.etag, "size": found.size}


def safetensors(*, cache_dir: str, **options: Any) -> Result:
    from huggingface_hub import get_safetensors_metadata

    found = get_safetensors_metadata(**options)
    return {"sharded": found.sharded, "weights": shown(found.weight_map), "parameters": shown(found.parameter_count)}


def file_system(*, place: str, path: str, cache_dir: str) -> Result:
    from huggingface_hub import HfFileSystem

    files = HfFileSystem(skip_instance_cache=True)
    name = f"{place}/{path}"
    with files.open(name, "rb") as opened:
        first = opened.read(5)
        opened.seek(-3, 2)
        last = opened.read()
    return {
        "ls": sorted(shown(files.ls(place)), key=lambda entry: str(entry["name"])),
        "find": sorted(files.find(place)),
        "glob": sorted(files.glob(f"{place}/**/*.txt")),
        "info": shown(files.info(name)),
        "read": [digest(files.read_bytes(name)), digest(first), digest(last), digest(files.cat_file(name, 2, 7))],
        "missing": [files.glob(f"{place}/none"), files.glob(f"{place}/nested/none")],
    }


def dataset(*, repo_id: str, streaming: bool, cache_dir: str, **options: Any) -> Result:
    import datasets

    loaded = datasets.load_dataset(repo_id, streaming=streaming, cache_dir=cache_dir, **options)
    return {name: list(part) for name, part in sorted(loaded.items())}


def model(*, repo_id: str, cache_dir: str, **options: Any) -> Result:
    """Configuration, tokenizer and weights of a model, by its name."""
    import transformers

    where = {"cache_dir": cache_dir, **options}
    config = transformers.AutoConfig.from_pretrained(repo_id, **where)
    tokenizer = transformers.AutoTokenizer.from_pretrained(repo_id, **where)
    loaded = transformers.AutoModel.from_pretrained(repo_id, **where)
    weights = {name: digest(tensor.numpy().tobytes()) for name, tensor in sorted(loaded.state_dict().items())}
    return {"kind": config.model_type, "tokens": tokenizer("hello world")["input_ids"], "weights": weights}


def make_model(*, place: str, cache_dir: str) -> Result:
    """Write a model of a few kilobytes with its tokenizer; returns its files."""
    import transformers

    words = Path(place, "vocab.txt")
    words.parent.mkdir(parents=True, exist_ok=True)
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=7, **sizes)
    transformers.BertModel(config).save_pretrained(place)
    transformers.BertTokenizerFast(vocab=str(words)).save_pretrained(place)
    return sorted(files_below(place))


def xet_available(*, cache_dir: str) -> Result:
    from huggingface_hub.utils._runtime import is_xet_available

    return is_xet_available()


CALLS: Final[tuple[Callable[..., Result], ...]] = (
    snapshot, snapshot_again, local_folder, file, remembered_absence, command, api, metadata, safetensors, file_system,
    dataset, model, make_model, xet_available,
)  # fmt: skip


def said_of(error: BaseException, cache_dir: str) -> dict[str, Any]:
    """Class, status and message of an error and of what caused it, without addresses, places and request ids."""
    response = getattr(error, "response", None)
    text = re.sub(r"\s*\(Request ID: [^)]*\)", "", str(error))
    for known, name in ((os.environ["HF_ENDPOINT"], "ENDPOINT"), (cache_dir, "CACHE")):
        text = text.replace(known, name)
    said: dict[str, Any] = {"error": type(error).__name__, "message": text}
    if response is not None:
        said |= {"status": response.status_code, "code": response.headers.get("X-Error-Code")}
    cause = error.__cause__
    return said | ({"cause": said_of(cause, cache_dir)} if cause else {})


def main() -> None:
    by_name = {call.__name__: call for call in CALLS}
    results: list[Result] = []
    for name, options in json.load(sys.stdin):
        with tempfile.TemporaryDirectory(dir=Path.home()) as cache, contextlib.redirect_stdout(sys.stderr):
            try:
                results.append(by_name[name](**{"cache_dir": cache, **options}))
            except Exception as error:
                results.append(said_of(error, cache))
    sys.stdout.write(MARK + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
