#!/bin/sh
# Resolve anew: sh requirements/lock.sh [--upgrade]. With --check: fail when pyproject.toml asks for something else.
# Hashed files without addresses, so that any index serves them.
set -eu
cd "$(dirname "$0")/.."
option=${1:-}
target=requirements
PYTHONS="3.11 3.12 3.13 3.14"
PROCESSORS="x86_64 aarch64"
if [ "$option" = --check ]; then
    option= target=$(mktemp -d)
    trap 'rm -r "$target"' EXIT
    cp requirements/*.txt "$target"
fi
lock() {
    .venv/bin/uv pip compile -q --no-header --no-annotate --generate-hashes --no-emit-index-url --no-emit-find-links \
        --python-version 3.11 $option "$@"
}
# What runs is installed on any Python from 3.11 on, and on any processor; what only tests need, where the tests run.
lock --universal pyproject.toml -o "$target/runtime.txt"
lock --universal --all-extras pyproject.toml requirements/build.in -c "$target/runtime.txt" -o "$target/setup.txt"
lock --all-extras --group dev pyproject.toml -c "$target/setup.txt" -o "$target/dev.txt"
lock requirements/aws.in -o "$target/aws.txt"
lock requirements/peers.in -o "$target/peers.txt"
lock requirements/training.in --excludes requirements/torch.in -o "$target/training.txt"
lock requirements/truss.in -o "$target/truss.txt"
lock requirements/uv.in -o "$target/uv.txt"
lock requirements/build.in -c "$target/setup.txt" -o "$target/build.txt"
for file in runtime setup dev aws peers training truss uv build; do
    cmp -s "$target/$file.txt" "requirements/$file.txt" ||
        { echo "requirements/$file.txt does not fit pyproject.toml; run: sh requirements/lock.sh" >&2; exit 1; }
done
# What was resolved anew must have a wheel for each Python and processor that the README names.
[ "$target" = requirements ] || exit 0
for python in $PYTHONS; do
    for processor in $PROCESSORS; do
        .venv/bin/uv pip install -q --dry-run --require-hashes --only-binary :all: -r requirements/setup.txt --target "${TMPDIR:-/tmp}/bdn-wheels" \
            --python-version "$python" --python-platform "$processor-unknown-linux-gnu" ||
            { echo "requirements/setup.txt cannot be installed on Python $python, $processor" >&2; exit 1; }
    done
done
