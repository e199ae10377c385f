#!/usr/bin/env bash
# Installs what bench/gateway.py compares the gateway with: LiteLLM's proxy and vllm-router in an environment of their own
# under .cache/runtimes, and nginx (the upstream), wrk (the load) and g++ from Debian. Does only what is missing: a second
# run is instant. Debian's packages need root.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LITELLM=1.106.12
ROUTER=0.1.17
PEERS=.cache/runtimes/gateway-peers-$LITELLM-$ROUTER

say() { echo "peers: $*" >&2; }

missing=()
command -v nginx >/dev/null || [[ -x /usr/sbin/nginx ]] || missing+=(nginx-light)
command -v wrk >/dev/null || missing+=(wrk)
command -v g++ >/dev/null || missing+=(g++)
command -v taskset >/dev/null || missing+=(util-linux)
if ((${#missing[@]})); then
    say "Debian packages: ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >/dev/null
fi

if [[ ! -e $PEERS/.complete ]]; then
    say "LiteLLM $LITELLM and vllm-router $ROUTER into $PEERS"
    "$PYTHON" -m venv "$PEERS"
    "$PEERS/bin/pip" install --quiet "litellm[proxy]==$LITELLM" "vllm-router==$ROUTER"
    touch "$PEERS/.complete"
fi
