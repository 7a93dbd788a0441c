#!/usr/bin/env bash
# The ablation of cache affinity, small, and a few exercises besides, against real
# SGLang servers of two data-parallel ranks each, on CPU, on loopback, with
# sidecars. Takes 5 to 15 minutes; the first time some more, and 10 GB of disk.
# Not part of `cargo test`.
#
#   tests/real/sglang_cpu.sh
#
# Needs Linux on x86-64 with AVX512 (Debian and Ubuntu are tried), gcc, curl, uv,
# procps, a python3 with venv, and 6 GB of free memory a server. From the environment:
#
#   SGLANG_ENV  where SGLang and the model are, or are put: a virtual environment
#               in $SGLANG_ENV/sgl is used as it is [~/.cache/berth/sglang]
#   SERVERS     1 or 2 [2, or 1 where less than 12 GB of memory are free]
#   ENGINES     URLs of such servers that run already, instead of starting any
#   BERTH       the binary [target/release/berth, built if need be]
#   OUT         folder for report.json, chart.svg and all logs [a new one]
#   START_SECONDS  how long servers may take to start [900]
set -euo pipefail

SGLANG_VERSION=0.5.23
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../.." && pwd)
SGLANG_ENV=${SGLANG_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/berth/sglang}
START_SECONDS=${START_SECONDS:-900}
OUT=${OUT:-$(mktemp -d -t berth-real-XXXXXX)}
mkdir -p "$OUT" "$SGLANG_ENV"

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
die() {
  say "$*" >&2
  exit 1
}

# Everything that is started here leads a process group of its own, and is ended
# by it: the newest first, so that sidecars take their leave.
groups=()
start() { # name command...
  local name=$1
  shift
  setsid "$@" >"$OUT/$name.log" 2>&1 </dev/null &
  groups=("$! $name" "${groups[@]}")
}
alive() { kill -0 -- "-$1" 2>/dev/null; }
finish() {
  local status=$? group pid
  trap - EXIT INT TERM
  for group in "${groups[@]}"; do
    pid=${group%% *}
    # Its leader only, so that it can end its own processes in order.
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
      alive "$pid" || break
      sleep 0.2
    done
    # What is left of an engine's schedulers.
    if alive "$pid"; then kill -KILL -- "-$pid" 2>/dev/null || true; fi
  done
  say "logs and report: $OUT"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
still_there() { # all that was started
  local group
  for group in "${groups[@]}"; do
    if ! kill -0 "${group%% *}" 2>/dev/null; then
      tail -n 25 "$OUT/${group#* }.log" >&2
      die "${group#* } has ended"
    fi
  done
}
wait_ready() { # url seconds
  local end=$((SECONDS + $2))
  until curl -fs -m 2 -o /dev/null "$1"; do
    still_there
    ((SECONDS < end)) || die "$1 does not answer"
    sleep 0.5
  done
}

free_ports() { # count: ports that nobody has, below the kernel's own range
  python3 - "$1" <<'PYTHON'
import random, socket, sys
found = []
while len(found) < int(sys.argv[1]):
    port = random.SystemRandom().randrange(20_000, 32_000)
    # SGLang derives further ports from its own.
    if all(abs(port - other) > 300 for other in found):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
print(*found)
PYTHON
}

# --- what is needed -----------------------------------------------------------

BERTH=${BERTH:-$root/target/release/berth}
if [[ ! -x $BERTH ]]; then
  say "building $BERTH"
  (cd "$root" && cargo build --release)
fi

# A stock gRPC client, as a trainer has it.
client=python3
if ! python3 -c 'import grpc_tools, grpc' 2>/dev/null; then
  client=$SGLANG_ENV/client/bin/python
  if [[ ! -x $client ]]; then
    uv venv "$SGLANG_ENV/client"
    uv pip install --python "$client" -r "$root/tests/python/requirements.txt"
  fi
fi

if [[ -n ${ENGINES:-} ]]; then
  read -ra engines <<<"$ENGINES"
  for url in "${engines[@]}"; do wait_ready "$url/ready" 10; done
else
  sgl=$SGLANG_ENV/sgl/bin/python
  if [[ ! -x $sgl ]]; then
    say "installing SGLang $SGLANG_VERSION into $SGLANG_ENV"
    uv venv --python 3.11 "$SGLANG_ENV/sgl"
    uv pip install --python "$sgl" "sglang==$SGLANG_VERSION"
  fi
  model=$SGLANG_ENV/random-qwen3
  if [[ ! -e $model/model.safetensors ]]; then
    "$sgl" "$here/make_model.py" "$model.new"
    rm -rf "$model"
    mv "$model.new" "$model"
  fi
  lib=$SGLANG_ENV/lib
  mkdir -p "$lib"
  gcc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$lib/libcuda.so.1" \
    "$here/no_gpu_driver.c"
  gcc -O2 -shared -fPIC -o "$lib/bind_loopback.so" "$here/bind_loopback.c" -ldl

  if [[ -z ${SERVERS:-} ]]; then
    free_kb=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
    SERVERS=$((free_kb >= 12 * 1000 * 1000 ? 2 : 1))
  fi
  [[ $SERVERS == [12] ]] || die "SERVERS is 1 or 2"

  # Two cores for each server where there are so many.
  mapfile -t cores < <(python3 -c '
import os
print(*sorted(os.sched_getaffinity(0)), sep="\n")')
  read -ra ports < <(free_ports "$SERVERS")
  engines=()
  for ((i = 0; i < SERVERS; i++)); do
    port=${ports[i]}
    # One of them streams as it does by default, each frame repeating those
    # before it; the other sends only what is new.
    kind=()
    if ((i == 1)); then kind=(--incremental-streaming-output); fi
    bind="${cores[2 * i % ${#cores[@]}]}|${cores[(2 * i + 1) % ${#cores[@]}]}"
    start "sglang-$i" env LD_PRELOAD="$lib/bind_loopback.so" LD_LIBRARY_PATH="$lib" \
      SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="$bind" OMP_NUM_THREADS=1 \
      HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= \
      "$sgl" -m sglang.launch_server --model-path "$model" --skip-tokenizer-init \
      --device cpu --attention-backend torch_native --mem-fraction-static 0.5 \
      --max-total-tokens 32768 --dp-size 2 --disable-cuda-graph \
      --disable-overlap-schedule --enable-cache-report --sleep-on-idle \
      --served-model-name random-qwen3 --host 127.0.0.1 --port "$port" "${kind[@]}"
    engines+=("http://127.0.0.1:$port")
  done
  say "starting $SERVERS SGLang servers of two ranks each"
  for ((i = 0; i < SERVERS; i++)); do
    wait_ready "${engines[i]}/ready" "$START_SECONDS"
    say "${engines[i]} is ready"
  done
  # SGLang's controller of ranks polls, one whole core for each server; what it
  # takes shall not be taken from the schedulers.
  for group in "${groups[@]}"; do
    pgrep -g "${group%% *}" -f data_parallel_controller |
      xargs -r renice -n 19 -p >/dev/null || true
  done
fi

# --- Berth --------------------------------------------------------------------

read -r grpc_port admin_port < <(free_ports 2)
control_plane=http://127.0.0.1:$grpc_port
start serve "$BERTH" serve --listen "127.0.0.1:$grpc_port" \
  --admin-listen "127.0.0.1:$admin_port" --data-dir "$OUT/data"
for i in "${!engines[@]}"; do
  start "sidecar-$i" "$BERTH" sidecar --control-plane "$control_plane" \
    --engine-url "${engines[i]}" --replica-id "sglang-$i"
done

failed=0
say "ablation"
RUST_BACKTRACE=0 "$BERTH" bench affinity --control-plane "$control_plane" --replicas "${#engines[@]}" \
  --trajectories 4 --turns 4 --initial-prompt-tokens 512 --output-tokens 32 \
  --baseline round_robin --min-hit-rate 1.0 --out "$OUT" 2>"$OUT/bench.log" || {
  failed=1
  tail -n 5 "$OUT/bench.log"
}
if [[ -e $OUT/report.json ]]; then
  python3 "$here/check_report.py" "$OUT/report.json" $((2 * ${#engines[@]})) || failed=1
fi
say "exercises"
"$client" "$here/exercise.py" "127.0.0.1:$grpc_port" "${engines[@]}" || failed=1
still_there
exit "$failed"
