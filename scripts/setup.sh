#!/usr/bin/env bash
# setup.sh server|test [PORT]: make .venv and install into it what is not there yet. A second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:?server or test}
port=${2:-}
python=${PYTHON:-python3}
torch=2.13.0
fail() { echo "error: $*" >&2; exit 2; }

command -v "$python" >/dev/null || fail "$python is not there: install Python 3.11, 3.12 or 3.13, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  fail "$("$python" -V) does not fit: moesaic needs Python 3.11, 3.12 or 3.13; name one with PYTHON=..."
if [ "$what" = server ]; then
  [[ "$port" =~ ^[0-9]{1,5}$ ]] && [ "$port" -le 65535 ] || fail "PORT must be a number from 0 to 65535, got '$port'"
  "$python" - "$port" <<'PY' || fail "port $port on 127.0.0.1 cannot be listened on: choose another with PORT=..."
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
PY
fi

# The stamp names everything that decides what is installed.
stamp=".venv/.installed-$what-$( { cat pyproject.toml "$0"; pwd; echo "$torch ${TORCH_INDEX_URL:-}"; } | cksum | tr ' ' - )"
[ -e "$stamp" ] && exit 0

free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
[ "$free_kb" -gt 3000000 ] || fail "$((free_kb / 1024)) MiB free under $PWD: the installation needs about 3 GB"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python has no venv module: install your system's python3-venv package"

{
  echo "Installing into $PWD/.venv. pip will fetch what it has not cached:"
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    echo "  torch $torch        from TORCH_INDEX_URL=$TORCH_INDEX_URL"
  else
    echo "  torch $torch        from pip's own index; on Linux with an NVIDIA build that is several GB."
    echo "                       Stop with Ctrl-C and set TORCH_INDEX_URL to a CPU-only index for about 200 MB."
  fi
  echo "  cmake, nanobind       to build the native kernels ($(command -v c++ || echo "no C++ compiler here, so they are left out and matmuls are torch's own"))"
  echo "  moesaic[$what]      numpy, scipy, tokenizers, safetensors and what else pyproject.toml lists, about $([ "$what" = test ] && echo 150 || echo 70) MB"
} >&2

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
echo "Installing torch $torch and what it needs: minutes, without a word from pip ..." >&2
pip install --quiet "torch==$torch" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
echo "Installing moesaic[$what] and building its native kernels: about a minute ..." >&2
pip install --quiet -e ".[$what]" "torch==$torch"
echo "Installed." >&2
rm -f .venv/.installed-"$what"-*
touch "$stamp"
[ "$what" = server ] || touch "${stamp/installed-test/installed-server}" # the test extra contains the server's
