#!/bin/sh
# Resolve anew: sh requirements/lock.sh [--upgrade]. Hashed files without addresses, so that any index serves them.
set -eu
cd "$(dirname "$0")/.."
lock() { .venv/bin/uv pip compile -q --no-header --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.11 "$@"; }
lock --all-extras pyproject.toml -o requirements/runtime.txt ${1:-}
lock --all-extras --group dev pyproject.toml -c requirements/runtime.txt -o requirements/dev.txt ${1:-}
echo awscli | lock - -o requirements/aws.txt ${1:-}
echo uv | lock - -o requirements/uv.txt ${1:-}
