#!/usr/bin/env bash
# Cargo's runner of test binaries in scripts/test.sh: runs each test that failed again by itself, at most twice.
#
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/scripts/repeat-failed.sh cargo test …
#
# A test that passes when repeated is flaky: FLAKY (target/flaky) keeps its outputs, and its file `list` names it. A test
# that fails three times ends the run at once; its outputs are printed last and kept in FLAKY/failed. Tests without a
# result, because their process died or took longer than TEST_LIMIT seconds (1500), are repeated together.
set -uo pipefail
binary=$1
shift
ignored=()
[[ " $* " != *" --ignored "* ]] || ignored=(--ignored)
# Cargo also calls the runner for `cargo run` and documentation tests, which have no list of tests.
[[ $binary == */deps/* ]] || exec "$binary" "$@"
flaky=${FLAKY:-$(cd "$(dirname "$0")/.." && pwd)/target/flaky}
limit=${TEST_LIMIT:-1500}
name=$(basename "$binary")
name=${name%-*}
work=$(mktemp -d)
watch=
trap '[ -z "$watch" ] || kill -- "-$watch" 2>/dev/null; rm -rf "$work"' EXIT

# Runs the binary and shows its output: run LOG ARGUMENT…. LOG.results has a line for each test that ended.
# The binary is in the foreground: one in the background would ignore SIGINT, and so would its tests. Its output goes
# into a file, since a process that a test leaves behind would keep a pipe open.
run() {
  local log=$1 code=0 tail
  shift
  : >"$log"
  # Prints the stacks of tests that take too long, and kills them.
  setsid bash -c '
    sleep "$1"
    echo "no end after $1 s" >>"$3"
    for test in $(pgrep -f "^$2"); do
      ps -o pid=,args= "$test"
      timeout 120 gdb -p "$test" -batch -ex "thread apply all backtrace 16" 2>/dev/null | grep -E "^(Thread|#)"
    done >>"$3"
    pkill -KILL -f "^$2"' watch "$limit" "$binary" "$log" &
  watch=$!
  tail -n +1 -s 0.2 -f --pid="$watch" "$log" 2>/dev/null &
  tail=$!
  "$binary" --logfile "$log.results" "$@" >>"$log" 2>&1 || code=$?
  # The watch may not have its session yet.
  until kill -- "-$watch" 2>/dev/null; do
    kill -0 "$watch" 2>/dev/null || break
    sleep 0.1
  done
  wait "$watch" "$tail" 2>/dev/null
  watch=
  return "$code"
}

# Repeats tests that failed together, by themselves: repeat LABEL TEST…
repeat() {
  local label=$1 kept=$flaky/$name/${1//::/.} times code
  shift
  mkdir -p "$kept"
  cp "$work/first" "$kept/first.log"
  for times in 1 2; do
    printf '\n== %s: %s failed; repetition %s\n' "$name" "$label" "$times"
    code=0
    RUST_BACKTRACE=1 run "$work/again" --exact "$@" "${ignored[@]}" --nocapture --test-threads=1 || code=$?
    cp "$work/again" "$kept/repetition-$times.log"
    if [ "$code" = 0 ]; then
      printf '%s %s: failed in %s, passed in repetition-%s.log\n' "$name" "$label" "$kept/first.log" "$times" >>"$flaky/list"
      return 0
    fi
  done
  {
    printf '\n== %s: %s failed three times; its first output is in %s\n' "$name" "$label" "$kept/first.log"
    cat "$kept/repetition-1.log" "$kept/repetition-2.log"
  } | tee "$flaky/failed"
  return 1
}

run "$work/first" "$@"
code=$?
[ "$code" != 0 ] || exit 0

# Lines such as `failed module::test`, `ok module::test - should panic` and `ignored: a reason module::test`. A failure with
# another panic than expected has several lines; such a test counts as one without a result.
sed 's/ - should panic.*//; s/^ignored: .* /ignored /; /^failed: /d' "$work/first.results" >"$work/ended"
mapfile -t failed < <(sed -n 's/^failed //p' "$work/ended")
mapfile -t missing < <("$binary" --list "$@" 2>/dev/null | sed -n 's/: test$//p' |
  grep -vxF -f <(sed 's/^[a-z]* //' "$work/ended"))
if [ ${#failed[@]} = 0 ] && [ ${#missing[@]} = 0 ]; then
  exit "$code" # not a failure of a test: wrong arguments, say
fi
for test in "${failed[@]}"; do
  repeat "$test" "$test" || exit 101
done
case ${#missing[@]} in
0) ;;
1) repeat "${missing[0]}" "${missing[0]}" || exit 101 ;;
*) repeat "${#missing[@]}-tests-without-result" "${missing[@]}" || exit 101 ;;
esac
