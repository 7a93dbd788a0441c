# What the scripts beside this one share; sourced by them. A script says which
# engine it is for and how that is installed and started, and calls real_main.
#
# From the script:
#   kind            sglang or vllm
#   ready_path      what answers 200 once the engine takes work
#   install_engine  makes the engine and the model be there
#   start_engine I PORT CORES  starts server I; CORES is "A|B"
#   after_ready     once all are ready
#   sidecar_options an array
#   min_hit_rate    of the ablation: less than 1 where pages are large
# shellcheck shell=bash
# shellcheck disable=SC2154
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../.." && pwd)
START_SECONDS=${START_SECONDS:-900}
OUT=${OUT:-$(mktemp -d -t berth-real-XXXXXX)}
CHECKS=${CHECKS:-first_token ablation exercises faults}
mkdir -p "$OUT"

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
die() {
  say "$*" >&2
  exit 1
}

# Everything that is started here leads a process group of its own, and is ended
# by it: the newest first, so that sidecars take their leave.
groups=()
# Those that a check is to end; they need not be there any more.
doomed=0
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
still_there() { # all that was started, but for what a check was to end
  local group
  for group in "${groups[@]}"; do
    if ((doomed)) && [[ ${group#* } == "$kind-"* ]]; then continue; fi
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
wanted() { [[ " $CHECKS " == *" $1 "* ]]; }

free_ports() { # count: ports that nobody has, below the kernel's own range
  python3 - "$1" <<'PYTHON'
import random, socket, sys
found = []
while len(found) < int(sys.argv[1]):
    port = random.SystemRandom().randrange(20_000, 32_000)
    # Engines derive further ports from their own.
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

need_berth() {
  BERTH=${BERTH:-$root/target/release/berth}
  if [[ ! -x $BERTH ]]; then
    say "building $BERTH"
    (cd "$root" && cargo build --release)
  fi
}

need_client() { # a stock gRPC client, as a trainer has it, in a folder
  client=python3
  if ! python3 -c 'import grpc_tools, grpc' 2>/dev/null; then
    client=$1/client/bin/python
    if [[ ! -x $client ]]; then
      uv venv "$1/client"
      uv pip install --python "$client" -r "$root/tests/python/requirements.txt"
    fi
  fi
}

need_model() { # python folder
  if [[ ! -e $2/model.safetensors ]]; then
    "$1" "$here/make_model.py" "$2.new"
    rm -rf "$2"
    mv "$2.new" "$2"
  fi
}

# Sets `engines` to URLs, and `leaders` to the process groups that lead them.
need_engines() {
  local i port ports cores free_kb given
  leaders=()
  if [[ -n ${ENGINES:-} ]]; then
    read -ra given <<<"$ENGINES"
    engines=("${given[@]%%=*}")
    for i in "${!given[@]}"; do
      wait_ready "${engines[i]}$ready_path" 10
      if [[ ${given[i]} == *=* ]]; then leaders+=("${given[i]#*=}"); fi
    done
    return
  fi
  install_engine
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
    start_engine "$i" "$port" \
      "${cores[2 * i % ${#cores[@]}]}|${cores[(2 * i + 1) % ${#cores[@]}]}"
    engines+=("http://127.0.0.1:$port")
    leaders+=("${groups[0]%% *}")
  done
  say "starting $SERVERS servers of two ranks each ($kind)"
  local begun=$SECONDS
  for ((i = 0; i < SERVERS; i++)); do
    wait_ready "${engines[i]}$ready_path" "$START_SECONDS"
    say "${engines[i]} is ready after $((SECONDS - begun)) s"
  done
  after_ready
}

real_main() {
  local i failed=0 grpc_port admin_port control_plane
  need_berth
  need_engines
  if wanted first_token; then
    say "first token"
    # Before anything else: nothing is warm but the engine.
    "$client" "$here/first_token.py" "$BERTH" "$kind" "$OUT" "${engines[0]}" \
      "${sidecar_options[@]}" || failed=1
  fi
  read -r grpc_port admin_port < <(free_ports 2)
  control_plane=http://127.0.0.1:$grpc_port
  start serve "$BERTH" serve --listen "127.0.0.1:$grpc_port" \
    --admin-listen "127.0.0.1:$admin_port" --data-dir "$OUT/data"
  for i in "${!engines[@]}"; do
    start "sidecar-$i" "$BERTH" sidecar --control-plane "$control_plane" \
      --engine "$kind" --engine-url "${engines[i]}" --replica-id "$kind-$i" \
      "${sidecar_options[@]}"
  done
  if wanted ablation; then
    say "ablation"
    RUST_BACKTRACE=0 "$BERTH" bench affinity --control-plane "$control_plane" \
      --replicas "${#engines[@]}" --trajectories 4 --turns 4 \
      --initial-prompt-tokens 512 --output-tokens 32 --baseline round_robin \
      --min-hit-rate "$min_hit_rate" --out "$OUT" 2>"$OUT/bench.log" || {
      failed=1
      tail -n 5 "$OUT/bench.log"
    }
    if [[ -e $OUT/report.json ]]; then
      python3 "$here/check_report.py" "$OUT/report.json" $((2 * ${#engines[@]})) ||
        failed=1
      # Less KV than any of these engines has, and more than the workload needs.
      python3 "$here/check_simulation.py" "$BERTH" "$OUT/report.json" 30000 || failed=1
    fi
  fi
  if wanted exercises; then
    say "exercises"
    "$client" "$here/exercise.py" "127.0.0.1:$grpc_port" "$kind" "${engines[@]}" ||
      failed=1
    still_there
  fi
  if wanted faults; then
    if ((${#leaders[@]} < ${#engines[@]})); then
      say "faults: left out, they end servers, and ENGINES does not say which processes"
    else
      say "faults"
      doomed=1
      "$client" "$here/faults.py" "127.0.0.1:$grpc_port" "$BERTH" "$kind" \
        "$FROZEN_AFTER" $(paste -d = <(printf '%s\n' "${engines[@]}") \
          <(printf '%s\n' "${leaders[@]}")) || failed=1
    fi
  fi
  still_there
  exit "$failed"
}
