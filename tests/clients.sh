#!/usr/bin/env bash
# Stock gRPC clients in Python and Node against real processes of berth:
# tests/python and tests/node. What they need is installed into a temporary
# folder that is gone afterwards; nothing is left in the work tree.
#
#   BERTH_BIN   the binary; default target/debug/berth, built where it is missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z ${BERTH_BIN:-} ]]; then
    BERTH_BIN=${CARGO_TARGET_DIR:-target}/debug/berth
    [[ -x $BERTH_BIN ]] || cargo build --locked --bin berth
fi
BERTH_BIN=$(realpath "$BERTH_BIN")
[[ -x $BERTH_BIN ]] || { echo "clients: $BERTH_BIN cannot be run" >&2; exit 1; }
export BERTH_BIN
# The tests start control planes of their own.
unset BERTH_CONTROL_PLANE

temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT
export TMPDIR=$temp PYTHONDONTWRITEBYTECODE=1

python3 -m venv "$temp/venv"
"$temp/venv/bin/pip" install --quiet --disable-pip-version-check -r tests/python/requirements.txt

# A copy, since npm installs beside package.json.
mkdir "$temp/tests"
cp -r proto "$temp/proto"
cp -r tests/node "$temp/tests/node"
rm -rf "$temp/tests/node/node_modules"
npm ci --prefix "$temp/tests/node" --no-audit --no-fund --silent

status=0
"$temp/venv/bin/python" -m pytest -p no:cacheprovider --basetemp="$temp/pytest" \
    --junitxml="$temp/python.xml" -q tests/python || status=1
(cd "$temp/tests/node" && node --test --test-concurrency=1 \
    --test-reporter=spec --test-reporter-destination=stdout \
    --test-reporter=tap --test-reporter-destination="$temp/node.tap") || status=1

# Whoever ended without a count has failed.
count() { sed -n "s/$2/\1/p" "$1" 2>/dev/null | head -n 1; }
python_all=$(count "$temp/python.xml" '.* tests="\([0-9]*\)".*')
python_failed=$(count "$temp/python.xml" '.* failures="\([0-9]*\)".*')
python_errors=$(count "$temp/python.xml" '.* errors="\([0-9]*\)".*')
python_skipped=$(count "$temp/python.xml" '.* skipped="\([0-9]*\)".*')
node_passed=$(count "$temp/node.tap" '^# pass \([0-9]*\)$')
node_all=$(count "$temp/node.tap" '^# tests \([0-9]*\)$')
bad=$((${python_failed:-1} + ${python_errors:-0}))
passed=$((${python_all:-0} - ${python_failed:-0} - ${python_errors:-0} - ${python_skipped:-0}))
passed=$((passed + ${node_passed:-0}))
bad=$((bad + ${node_all:-1} - ${node_passed:-0}))
# A test that did not run is not one that passed.
bad=$((bad + ${python_skipped:-0}))
((bad == 0)) || status=1
echo "clients: $passed passed, $bad failed"
exit "$status"
