#!/usr/bin/env bash
# The nightly run: every fuzzer for so many seconds, 600 unless told, one after the other.
#
#   fuzz/run.sh [SECONDS [TARGET ...]]
#
# Needs `cargo install --locked cargo-fuzz --version 0.13.2` and a C++ compiler. It ends
# with 1 where something was found: what it was lies in fuzz/artifacts/TARGET. Moved to
# fuzz/findings/TARGET it is a test from then on (src/fuzzing.rs).
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-600}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls seeds)

# libFuzzer's instrumentation is no part of stable Rust. No sanitizer: Berth has no unsafe
# code, and what is looked for panics.
export RUSTC_BOOTSTRAP=1
cargo fuzz build --sanitizer none

found=0
for target in "${targets[@]}"; do
  mkdir -p "corpus/$target" "findings/$target"
  printf '\n=== %s, %s s\n' "$target" "$seconds"
  # A new input goes to the first folder; the others are only read.
  cargo fuzz run --sanitizer none "$target" \
    "corpus/$target" "seeds/$target" "findings/$target" -- \
    -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 || found=1
done
exit "$found"
