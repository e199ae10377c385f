#!/usr/bin/env bash
# Make .venv/ and install the pinned dependencies: `install.sh base` to serve, `install.sh dev` to test.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
what=${1:?base or dev}
python=${PYTHON:-python3}
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
say() { printf '%10s  %s\n' setup "$1"; }
trap 'echo "The environment is not complete; the lines above say why. Run the same command again to go on." >&2' ERR

"$python" - <<'PY' || { echo "Fanlight needs Python 3.11 or newer; name one with: make up PYTHON=python3.11" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

# Without pip it is new, was made by another tool, or was cut short while being made.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
    say "Making the environment .venv/"
    "$python" -m venv --clear .venv
    pip install "pip==$(sed -n 's/^pip==//p' requirements.lock)"
fi

# torch comes in builds of very different size; ask for the one this machine can use.
torch=$(sed -n 's/^torch==//p' requirements.lock)
build=${FANLIGHT_TORCH:-auto}
if [ "$build" = auto ]; then
    if [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null 2>&1; then build=cuda; else build=cpu; fi
fi
installed=$(.venv/bin/python -c "import torch; print(torch.__version__.partition('+')[0])" 2>/dev/null || true)
if [ "$installed" != "$torch" ]; then
    say "Installing torch $torch ($build)"
    if [ "$build" = cpu ] && pip install --only-binary=:all: "torch==$torch+cpu" 2>/dev/null; then
        :
    else
        if [ "$build" = cpu ]; then
            say "The small CPU build is not to be had from your package index; the build with CUDA takes about 3 GB."
            say "To avoid that, install a CPU build of torch $torch into .venv/ yourself and run this again."
        fi
        pip install "torch==$torch"
    fi
fi

# Everything else is pinned in full; --no-deps keeps a resolver from choosing another torch.
if [ "$what" = base ]; then
    say "Installing $(grep -c == requirements.lock) pinned packages"
    pip install --no-deps --requirement <(grep -v '^torch==' requirements.lock)
else
    say "Installing $(grep -c == requirements-dev.lock) more for tests"
    pip install --no-deps --requirement requirements-dev.lock
fi
touch ".venv/.$what"
