#!/usr/bin/env bash
# A plain `pip install .` into a fresh environment gives the torch-free half and the command.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check .
cd "$folder"
venv/bin/moesaic --version
venv/bin/moesaic inspect deepseek-v3 --json >/dev/null
venv/bin/python -c 'import importlib.util as u; assert u.find_spec("torch") is None, "the plain install pulled torch in"'
venv/bin/moesaic serve demo 2>message && exit 1
grep -q "moesaic\[server\]\|moesaic\[engine\]" message
venv/bin/moesaic verify demo 2>message && exit 1
grep -q "moesaic\[engine\]" message
venv/bin/python -c 'import moesaic; moesaic.LLM' 2>message && exit 1
grep -q "moesaic\[engine\]" message
