#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under ten minutes: build, GPU tests, op benchmarks with checks, prefill.
#
#   scripts/gpu_check.sh [--build] [--tests [FILE...]] [--dist [ARGUMENT...]] [--bench-ops [OP...]] [--prefill [ARGUMENT...]]
#                        [--sanitizer FILE]
#
# Without options: build, tests, bench-ops, prefill, and dist where there are several GPUs: the tests of several ranks, the links,
# and a step over all GPUs (2, 4 or 8) whose arguments may follow, e.g. --num-experts 320 where 2 GPUs must hold the experts.
# Everything is written below ${OUT:-results}; summary.txt says what passed. Exit status 1 if anything failed. LIMIT_S (default
# 570) bounds the whole.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
PYTHON=${PYTHON:-$(command -v python3 || command -v python)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
end=$((SECONDS + ${LIMIT_S:-570}))
failed=0
parts=()
test_files=()
ops=()
prefill_arguments=()
dist_arguments=()
sanitized=
while [ $# -gt 0 ]; do
    case $1 in
        --build) parts+=(build); shift ;;
        --tests) parts+=(tests); shift; while [ $# -gt 0 ] && [[ $1 != --* ]]; do test_files+=("$1"); shift; done ;;
        --bench-ops) parts+=(bench_ops); shift; while [ $# -gt 0 ] && [[ $1 != --* ]]; do ops+=(--op "$1"); shift; done ;;
        --dist) parts+=(dist); shift; dist_arguments=("$@"); break ;;
        --prefill) parts+=(prefill); shift; prefill_arguments=("$@"); break ;;
        --sanitizer) parts+=(sanitizer); sanitized=${2:?--sanitizer needs a test file}; shift 2 ;;
        *) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    esac
done
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ ${#parts[@]} -eq 0 ]; then
    parts=(build tests bench_ops prefill)
    [ "$gpus" -lt 2 ] || parts+=(dist)
fi

last_line() { grep -v '^ *$' "$1" | tail -n 1 | cut -c -160; }
say() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME SECONDS LOG COMMAND...: run with a limit, never past the end of the whole; one line in the summary.
step() {
    local name=$1 seconds=$2 log=$out/$3 start=$SECONDS status left
    shift 3
    left=$((end - SECONDS))
    if [ "$left" -lt 5 ]; then
        say "SKIP  $name: no time left"
        failed=1
        return 1
    fi
    echo "=== $name" >>"$log"
    timeout -k 10 "$((left < seconds ? left : seconds))" "$@" >>"$log" 2>&1
    status=$?
    case $status in
        0) say "PASS  $name ($((SECONDS - start)) s) $(last_line "$log")" ;;
        124 | 137) say "FAIL  $name: over its limit of $((left < seconds ? left : seconds)) s" ;;
        *) say "FAIL  $name: exit status $status: $(last_line "$log")" ;;
    esac
    [ $status -eq 0 ] || failed=1
    return $status
}

build() { step build 240 build.log "$PYTHON" setup.py build_ext --inplace; }

tests() {
    local file
    [ ${#test_files[@]} -gt 0 ] || test_files=(tests/gpu/test_*.py)
    for file in "${test_files[@]}"; do # a process each: a device fault ends one file, not all
        step "$file" 150 tests.log "$PYTHON" -m pytest -q -p no:cacheprovider "$file"
    done
}

bench_ops() {
    step bench_ops 240 bench_ops.log \
        "$PYTHON" bench/bench_ops.py --check --result-filename "$out/bench_ops.jsonl" ${ops[@]+"${ops[@]}"}
    grep -v '^===' "$out/bench_ops.log" | cut -c -200
}

prefill() {
    step prefill 300 prefill.log "$PYTHON" bench/bench_prefill.py --load-format dummy --ep-loopback 4 \
        --no_cuda_graph --result_jsonl "$out/prefill.jsonl" ${prefill_arguments[@]+"${prefill_arguments[@]}"}
    tail -n 45 "$out/prefill.log"
}

dist() {
    local ranks=2
    [ "$gpus" -lt 4 ] || ranks=4
    [ "$gpus" -lt 8 ] || ranks=8
    local launch=("$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks")
    # Two GPUs of 141 GB cannot hold 192 experts each.
    [ "$ranks" -gt 2 ] || [ ${#dist_arguments[@]} -gt 0 ] || dist_arguments=(--num-experts 320)
    step tests/dist 300 dist.log "$PYTHON" -m pytest -q -p no:cacheprovider tests/dist -k "nccl or test_gpu_ranks"
    step links 60 dist.log "${launch[@]}" bench/bench_links.py --result_jsonl "$out/links.jsonl"
    step "prefill on $ranks GPUs" 200 dist.log "${launch[@]}" bench/bench_prefill.py --load-format dummy --no_cuda_graph \
        --result_jsonl "$out/prefill.jsonl" ${dist_arguments[@]+"${dist_arguments[@]}"}
    tail -n 60 "$out/dist.log"
}

sanitizer() {
    step "sanitizer $sanitized" 400 sanitizer.log compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$PYTHON" -m pytest -q -x -p no:cacheprovider "$sanitized"
}

: >"$out/summary.txt"
rm -f "$out"/{build,tests,bench_ops,prefill,dist,sanitizer}.log
say "gpu_check: $(git describe --always --dirty 2>/dev/null || echo 'no git'), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
for part in "${parts[@]}"; do "$part"; done
for log in "$out"/*.log; do # what comes back must stay small
    [ "$(stat -c %s "$log")" -le $((12 << 20)) ] || { tail -c $((12 << 20)) "$log" >"$log.tail" && mv "$log.tail" "$log"; }
done
[ $failed -eq 0 ] && say "gpu_check: all passed" || say "gpu_check: FAILED"
exit $failed
