#!/usr/bin/env bash
# First contact with a GPU, in phases that run one by one, log, and go on after a failure.
#
#   benches/first_contact.sh build        release programs in target/first-contact
#   benches/first_contact.sh --list       the phases and their limits
#   benches/first_contact.sh [PHASE…]     all phases in order, or these
#   EMULATE=1 benches/first_contact.sh    the same on the emulated GPU, with tiny shapes
#
# A run needs this tree with target/first-contact, a driver, and Python with torch; neither cargo nor a network.
# PYTHON (python3) has torch, EVENKEEL_CUDA_LIBRARIES are by default that Python's packages. Logs are in
# target/first-contact/logs and, where OUT names a directory, in $OUT/first-contact.tar.gz.
set -uo pipefail
cd "$(dirname "$0")/.."

# Phase, limit in seconds, what it shows. Less than 30 minutes in all.
phases="\
device       30 the device, its driver, and its description for cuDNN
ceilings     60 copy bandwidth; every matrix product of the models by each algorithm of cuBLASLt
conformance 150 every form of PTX that the emulated GPU knows: bits, or PTX's bounds
kernels     120 every kernel against formulas in f64
parity       60 gradients, 50 losses and repeatability of small models against the CPU engine
nccl         30 NCCL with one rank; a rank that never comes; two ranks on one GPU
launch       60 a recipe: trained on the GPU, stopped, continued on the CPU and on the GPU, its ledger proved
train       120 MicroLlama with the norm test by evenkeel launch: tokens/s of a run
oom          45 a real out-of-memory, after which the device still computes
norm-test   100 what measuring for the norm test adds to a step
sanitizer    60 compute-sanitizer's four tools over a step of a tiny model
sweep       120 tokens/s by micro-batch; without graphs, with checkpointing, with accumulation
peer        150 the PyTorch peer alone: tokens/s, peak memory
speed       300 A B A B against the peer: ratio of tokens/s, peak memory
long        220 sequences of 8 k and 32 k tokens against the peer
profile      90 time and bandwidth of the slowest kernels of a step, by ncu"
absent="cuDNN's attention, NCCL between GPUs"

conformance=(floats integers conversions warps matrices wgmma memory)
kernels=(kernels attention)
helpers=benches/first_contact
python=${PYTHON:-python3}
packages='import sysconfig; print(sysconfig.get_path("platlib"))'

# Builds all programs into a directory: DIRECTORY [OPTION…]
build() {
  rm -rf "$1" && mkdir -p "$1" || return
  local program path tests=("${conformance[@]/#/--test=}" "${kernels[@]/#/--test=}")
  # All at once: another choice of targets has other features, and compiles dependencies again.
  cargo test --locked --no-run --workspace "${@:2}" --bin evenkeel --bench gpu "${tests[@]}" \
    --message-format=json-render-diagnostics >"$1/messages" || return
  while read -r program path; do
    ln -f "$path" "$1/$program" 2>/dev/null || cp "$path" "$1/$program"
  done < <("$python" -c 'import json, sys
for line in map(json.loads, sys.stdin):
    # Not the unit tests of the program.
    if line.get("executable") and not (line["profile"]["test"] and line["target"]["kind"] == ["bin"]):
        print(line["target"]["name"], line["executable"])
    for file in line.get("filenames", []):
        if file.endswith("libemulated_gpu.so"):
            print("libemulated_gpu.so", file)' <"$1/messages")
  rm "$1/messages"
  for path in shared/bench/pytorch_llama.py ../shared/bench/pytorch_llama.py; do
    if [ -f "$path" ]; then cp "$path" "$1/"; fi
  done
}

skip() {
  echo "SKIPPED: $*"
  exit 3
}

# Runs tests of emulated-gpu, whose launches the device repeats.
compare() {
  local test code=0
  for test in "$@"; do
    EVENKEEL_THOROUGH=1 EMULATED_GPU_COMPARE=1 "$programs/$test" --nocapture "${filter[@]}" || code=1
  done
  return "$code"
}

phase_device() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi -q; else echo "no nvidia-smi"; fi
  "$programs/evenkeel" gpus
  "$programs/gpu" device && "$python" "$helpers/device.py" "$programs/logs/deviceprop.json"
}

phase_ceilings() { "$programs/gpu" ceilings "${size[@]}"; }
phase_conformance() { compare "${conformance[@]}"; }
phase_parity() { "$programs/gpu" parity "${size[@]}"; }
phase_oom() { "$programs/gpu" oom "${size[@]}"; }

phase_nccl() { "$programs/gpu" nccl; }

# Each part continues the run of the one before.
phase_launch() {
  [ -z "${EMULATE:-}" ] || skip "tests/cuda_launch.rs does this on emulated GPUs"
  local run=$programs/runs/quickstart
  local train=("$programs/evenkeel" launch examples/quickstart.yaml --out "$run")
  timeout --foreground 6 "${train[@]}" --device cuda
  timeout --foreground 10 "${train[@]}" --device cpu --resume
  "${train[@]}" --device cuda --resume && proved "$run"
}

phase_train() {
  [ -z "${EMULATE:-}" ] || skip "the emulated GPU would take days"
  local run=$programs/runs/microllama
  "$programs/evenkeel" launch "$helpers/microllama.yaml" --device cuda --out "$run" && proved "$run"
}

# Proves a run's ledger, and keeps its report: RUN
proved() {
  cp "$1/report.html" "$programs/logs/${1##*/}.html"
  "$python" "$helpers/rates.py" "$1" && "$programs/evenkeel" status "$1" --ledger
}

phase_kernels() {
  if [ -n "${EMULATE:-}" ]; then
    echo "only the quick ones: the rest takes minutes on the emulated GPU, see scripts/nightly.sh"
    filter=(embedding rope gated adamw cast)
    kernels=(kernels)
  fi
  compare "${kernels[@]}"
}

phase_norm-test() {
  local model code=0
  for model in "${models[@]}"; do
    "$programs/gpu" norm-test --model "$model" "${size[@]}" --steps "$steps" || code=1
  done
  return "$code"
}

phase_sanitizer() {
  [ -z "${EMULATE:-}" ] || skip "the emulated GPU checks memory, races and barriers itself"
  command -v compute-sanitizer >/dev/null || skip "no compute-sanitizer on this machine"
  local run tool model precision ended code=0
  # Not initcheck in bf16: it misses what cuBLASLt's kernels store by bulk copies, and reports every read of it.
  for run in "memcheck tiny" "racecheck tiny" "synccheck tiny" "memcheck tiny --f32" "racecheck tiny --f32" \
    "synccheck tiny --f32" "initcheck tiny --f32" "memcheck tiny-64" "racecheck tiny-64" "synccheck tiny-64"; do
    read -r tool model precision <<<"$run"
    echo "== $run"
    ended=0
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/gpu" speed "${size[@]}" --model "$model" --batch 3 \
      --seq 140 --steps 1 --warmup 1 --no-graphs $precision >"$programs/logs/found" 2>&1 || ended=$?
    cat "$programs/logs/found"
    # racecheck does not see how cuBLASLt's kernels (nvjet) wait for bulk copies.
    if [ "$tool $ended" = "racecheck 9" ] && grep -q ' access at nvjet' "$programs/logs/found" &&
      ! grep ' access at ' "$programs/logs/found" | grep -qv nvjet; then
      echo "= SUMMARY: 0 outside of cuBLASLt"
      ended=0
    fi
    [ "$ended" = 0 ] || code=1
  done
  rm -f "$programs/logs/found"
  return "$code"
}

phase_sweep() {
  local model batch code=0 run
  run() { "$programs/gpu" speed --model "$model" "${size[@]}" --steps "$steps" "$@" || code=1; }
  for model in "${models[@]}"; do
    for batch in $batches; do run --batch "$batch"; done
    run --no-graphs
    run --checkpointing
    run --accumulation 4
  done
  return "$code"
}

phase_peer() {
  [ -z "${EMULATE:-}" ] || skip "speed runs the peer on the CPU, too"
  versus peer
}
phase_speed() { versus pairs; }

phase_long() {
  [ -z "${EMULATE:-}" ] || skip "the emulated GPU has no time"
  versus long
}

# Measures the PyTorch peer alone, or in turns with the engine.
versus() {
  [ -f "$programs/pytorch_llama.py" ] || skip "no PyTorch peer (../shared/bench/pytorch_llama.py)"
  "$python" -c 'import torch' 2>/dev/null || skip "$python has no torch"
  "$python" "$helpers/versus.py" "$1" "$programs" ${EMULATE:+--tiny}
}

phase_profile() {
  [ -z "${EMULATE:-}" ] || skip "the emulated GPU has no time"
  command -v ncu >/dev/null || skip "no ncu on this machine"
  local model code=0
  for model in "${models[@]}"; do
    # The clocks stay as they are.
    ncu --clock-control none --csv --page raw --print-units base --metrics gpu__time_duration.sum,dram__bytes.sum \
      "$programs/gpu" speed --model "$model" "${size[@]}" --steps 1 --warmup 0 --no-graphs \
      >"$programs/logs/ncu-$model.csv" && "$python" "$helpers/slowest.py" "$model" "$programs/logs/ncu-$model.csv" || code=1
  done
  return "$code"
}

# What all phases use.
prepare() {
  filter=()
  export EVENKEEL_CUDA_LIBRARIES=${EVENKEEL_CUDA_LIBRARIES:-$("$python" -c "$packages")}
  size=(--batch 8 --seq 2048 --cache "$programs/cache") models=(tinyllama microllama) batches="4 16" steps=10
  [ -n "${EMULATE:-}" ] || return
  size=(--batch 2 --seq 40 --cache "$programs/cache" --tiny --warmup 1) models=(tiny) batches="1 3" steps=1
  EVENKEEL_CUDA_LIBRARIES=$programs/libraries:$EVENKEEL_CUDA_LIBRARIES
  export LD_LIBRARY_PATH=$programs/libraries EMULATED_GPU_MEMORY=$((256 << 20))
}

# Runs a phase within its limit and adds its line to the table: PHASE
run() {
  local phase=$1 log=$programs/logs/$1.log start=$SECONDS code result headline limit
  limit=$(awk -v phase="$phase" '$1 == phase { print $2 }' <<<"$phases")
  [ ! -t 1 ] || printf '%-12s running…  at most %d s' "$phase" "$limit"
  timeout --kill-after=10 "$limit" benches/first_contact.sh --phase "$phase" >"$log" 2>&1 </dev/null
  code=$?
  if [ "$code" = 0 ] && grep -q '"ok": *false' "$log"; then code=1; fi
  case $code in
    0) result=passed ;;
    3) result=skipped ;;
    124 | 137) result=timeout ;;
    *) result=failed ;;
  esac
  headline=$("$python" "$helpers/headline.py" "$phase" "$log")
  [ ! -t 1 ] || printf '\r\033[K'
  printf '%-12s %-7s %5d s  %s\n' "$phase" "$result" $((SECONDS - start)) "$headline" |
    tee -a "$programs/logs/summary.txt"
  case $result in
    failed | timeout) { grep '"ok": *false' "$log" || tail -n 12 "$log"; } | head -n 12 | cut -c -300 | sed 's/^/    | /' ;;
  esac
  [ -z "${OUT:-}" ] || tar -czf "$OUT/first-contact.tar.gz" -C "$programs/logs" .
}

programs=$PWD/target/first-contact${EMULATE:+-emulated}
case ${1:-} in
  build)
    build "$programs" --release || exit
    rm "$programs/libemulated_gpu.so"
    echo "sizes, and the newest glibc that each program needs:"
    for file in "$programs"/*; do
      printf '%9d bytes  %-20s %s\n' "$(stat -c %s "$file")" "${file##*/}" \
        "$(grep -ao 'GLIBC_2\.[0-9]*' "$file" | sort -uV | tail -1)"
    done
    tar -czf "$programs.tar.gz" -C target "${programs##*/}"
    du -sh "$programs" "$programs.tar.gz"
    exit
    ;;
  --list)
    echo "$phases"
    echo "not there yet: $absent"
    exit
    ;;
  --phase)
    prepare
    "phase_$2"
    exit
    ;;
esac

chosen=${*:-$(awk '{ print $1 }' <<<"$phases")}
for phase in $chosen; do
  if ! grep -q "^$phase " <<<"$phases"; then
    echo "there is no phase $phase; benches/first_contact.sh --list shows them" >&2
    exit 2
  fi
done
if [ -n "${EMULATE:-}" ]; then
  build "$programs" || exit
  mkdir -p "$programs/libraries" target/cuda-kernels
  # The tests compile the same kernels.
  ln -s ../cuda-kernels "$programs/cache"
  for name in libcuda.so.1 libnvidia-ml.so.1 libcublasLt.so.12 libcublasLt.so.13 libnccl.so.2; do
    ln -s ../libemulated_gpu.so "$programs/libraries/$name"
  done
elif [ ! -x "$programs/gpu" ]; then
  echo "$programs/gpu is missing; run benches/first_contact.sh build first" >&2
  exit 2
fi
rm -rf "$programs/runs" && mkdir -p "$programs/logs" "$programs/runs"
printf '%-12s %-7s %7s  %s\n' PHASE RESULT TIME FINDING | tee "$programs/logs/summary.txt"
for phase in $chosen; do run "$phase"; done
echo "not there yet: $absent"
of() { grep -c "^[a-z-]* *$1 " "$programs/logs/summary.txt"; }
echo "$(of passed) passed, $(of skipped) skipped, $(of failed) failed, $(of timeout) at their limit, in $SECONDS s"
echo "logs: ${programs#"$PWD/"}/logs"
[ "$(of failed)$(of timeout)" = 00 ]
