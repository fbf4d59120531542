"""vLLM serves a model by its name: through the hub gateway, and offline from the cache of the hub that a pull made."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx2
import pytest

from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.network.ports import free_port
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, wait_until

VLLM: Final = os.environ.get("BDN_VLLM", "")  # the bin folder of an environment with vLLM: tests/README.md
LONGEST_SECONDS: Final = 600.0  # on two CPUs vLLM starts in half a minute
MAKE: Final = """
import sys, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
small = LlamaConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
LlamaForCausalLM(small).to(torch.bfloat16).save_pretrained(sys.argv[1], max_shard_size="5MB")
words = Tokenizer(models.BPE(unk_token="<unk>"))
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
special = ["<unk>", "<s>", "</s>"]
words.train_from_iterator([open(sys.argv[2]).read()], trainers.BpeTrainer(vocab_size=4000, special_tokens=special))
given = dict(zip(("unk_token", "bos_token", "eos_token"), special))
PreTrainedTokenizerFast(tokenizer_object=words, **given).save_pretrained(sys.argv[1])
"""

pytestmark = pytest.mark.skipif(not VLLM, reason="BDN_VLLM names no environment with vLLM")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A small model in shards, with a tokenizer."""
    subprocess.run([f"{VLLM}/python", "-c", MAKE, str(tmp_path / "made"), str(ROOT / "LICENSE")], check=True)
    return tree(tmp_path / "made")


@contextmanager
def vllm(home: Path, environment: Mapping[str, str]) -> Iterator[httpx2.Client]:
    """``vllm serve org/model``, ready."""
    home.mkdir()
    port, cpu = str(free_port()), {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = ("--host", "127.0.0.1", "--port", port, "--max-model-len", "256", "--enforce-eager")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [f"{VLLM}/vllm", "serve", "org/model", *options, "--dtype", "bfloat16"],
            env={"PATH": f"{VLLM}:{os.environ['PATH']}", "HOME": str(home), **cpu, **quiet, **environment},
            cwd=home,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=LONGEST_SECONDS) as http:
            wait_until(lambda: is_ready(http, process, home), what="vLLM", seconds=LONGEST_SECONDS)
            yield http
    finally:
        process.terminate()
        process.wait(LONGEST_SECONDS)


def is_ready(http: httpx2.Client, process: subprocess.Popen[bytes], home: Path) -> bool:
    assert process.poll() is None, (home / "log").read_text()[-4000:]
    with suppress(httpx2.TransportError):
        return http.get("/health").status_code == 200
    return False


def says(http: httpx2.Client) -> str:
    asked = {"model": "org/model", "prompt": "the licence", "max_tokens": 5, "temperature": 0}
    return str(http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"])


def test_vllm__by_name__serves_through_the_gateway_and_offline_from_a_pulled_cache(
    files: dict[str, bytes], hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit(files)
    cluster = Cluster(tmp_path / "cluster", {"HF_ENDPOINT": hub.url, "BDN_GATEWAY_ORGANISATION": "default"})
    cluster.root.mkdir()
    gateway, cache = f"127.0.0.1:{free_port()}", tmp_path / "hub"
    with cluster.mirror(), cluster.agent(BDN_AGENT_GATEWAY=gateway):
        with vllm(tmp_path / "through the gateway", {"HF_ENDPOINT": f"http://{gateway}"}) as served:
            first = says(served)
        sent = hub.log.bytes_served("/api/resolve-cache/") + hub.log.bytes_served(origin="cdn")
        assert sent == sum(map(len, files.values()))
        user = cluster.shell("user", BDN_EGRESS_ALLOW="127.0.0.1")
        user.root.mkdir()
        assert user.run("bdn", "pull", "hf://org/model", "--hub-cache", str(cache)).code == 0
    with vllm(tmp_path / "offline", {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}) as served:
        assert says(served) == first
