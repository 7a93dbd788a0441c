#!/usr/bin/env bash
# Real SGLang servers of two data-parallel ranks each, on CPU, on loopback, behind
# Berth and its sidecars. Takes 10 to 25 minutes; the first time some more, and
# 10 GB of disk. Not part of `cargo test`. README.md beside it says what is checked.
#
#   tests/real/sglang_cpu.sh
#
# Needs Linux on x86-64 with AVX512 (Debian and Ubuntu are tried), gcc, curl, uv,
# procps, a python3 with venv, and 6 GB of free memory a server. From the environment:
#
#   SGLANG_ENV  where SGLang and the model are, or are put: a virtual environment
#               in $SGLANG_ENV/sgl is used as it is [~/.cache/berth/sglang]
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

SGLANG_VERSION=0.5.23
SGLANG_ENV=${SGLANG_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/berth/sglang}
mkdir -p "$SGLANG_ENV"
kind=sglang
ready_path=/ready
# A step of prefill takes long where the cores are shared.
FROZEN_AFTER=10
min_hit_rate=1.0
sidecar_options=(--frozen-after "${FROZEN_AFTER}s")

install_engine() {
  sgl=$SGLANG_ENV/sgl/bin/python
  if [[ ! -x $sgl ]]; then
    say "installing SGLang $SGLANG_VERSION into $SGLANG_ENV"
    uv venv --python 3.11 "$SGLANG_ENV/sgl"
    uv pip install --python "$sgl" "sglang==$SGLANG_VERSION"
  fi
  model=$SGLANG_ENV/random-qwen3
  need_model "$sgl" "$model"
  lib=$SGLANG_ENV/lib
  mkdir -p "$lib"
  gcc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$lib/libcuda.so.1" \
    "$here/no_gpu_driver.c"
  gcc -O2 -shared -fPIC -o "$lib/bind_loopback.so" "$here/bind_loopback.c" -ldl
}

start_engine() { # number port cores
  # The last one's schedulers tell that they are alive while they have nothing to
  # do, which takes a core each; so one that dies idle is noticed. Of two servers
  # the first streams as it does by default, each frame repeating those before it;
  # the other sends only what is new.
  local more=()
  if (($1 == 1)); then more+=(--incremental-streaming-output); fi
  if (($1 < SERVERS - 1)); then more+=(--sleep-on-idle); fi
  start "sglang-$1" env LD_PRELOAD="$lib/bind_loopback.so" LD_LIBRARY_PATH="$lib" \
    SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="$3" OMP_NUM_THREADS=1 \
    HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= \
    "$sgl" -m sglang.launch_server --model-path "$model" --skip-tokenizer-init \
    --device cpu --attention-backend torch_native --mem-fraction-static 0.5 \
    --max-total-tokens 32768 --dp-size 2 --disable-cuda-graph \
    --disable-overlap-schedule --enable-cache-report \
    --served-model-name random-qwen3 --host 127.0.0.1 --port "$2" "${more[@]}"
}

after_ready() {
  # SGLang's controller of ranks polls, one whole core for each server; what it
  # takes shall not be taken from the schedulers.
  local leader
  for leader in "${leaders[@]}"; do
    pgrep -g "$leader" -f data_parallel_controller |
      xargs -r renice -n 19 -p >/dev/null || true
  done
}

need_client "$SGLANG_ENV"
real_main
