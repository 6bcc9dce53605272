#!/usr/bin/env bash
# Measure prefill steps with what this machine has; arguments are passed on to bench/bench_prefill.py.
#
#   4 or more GPUs   one rank per GPU on 4 GPUs (NCCL), released shapes
#   1 to 3 GPUs      one process does the work of rank 0 of 4 (--ep-loopback 4), released shapes
#   none             a tiny checkpoint over 4 gloo ranks on the CPU
#
# On GPUs this is the main measurement: 4,096 new tokens a rank and step of a 131,072-token request with 126,976 tokens cached, ten
# steps, then two under the stage timers. The row has every rank's times and memory. Without --model the GPU modes use
# random weights of the released shapes. With --profile DIR the last two steps also run under the torch profiler, one trace per
# rank. Rows go to ${OUT:-results}/prefill.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
ensure_environment

out=${OUT:-results}
mkdir -p "$out"
has_model=
for argument in "$@"; do
    case $argument in --model | --model=*) has_model=1 ;; esac
done
# --local-addr: the ranks meet on this host even where its name does not resolve.
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4 "$@"; }

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
arguments=(--no_cuda_graph --result_jsonl "$out/prefill.jsonl")
[ -n "$has_model" ] || [ "$gpus" -eq 0 ] || arguments+=(--load-format dummy)
headline=(--context-len 131072 --num-steps 10) # cached: all but the new tokens, however many those are
if [ "$gpus" -ge 4 ]; then
    echo "run_prefill: $gpus GPUs: 4 ranks, one GPU each" >&2
    torchrun bench/bench_prefill.py "${headline[@]}" "${arguments[@]}" "$@"
elif [ "$gpus" -ge 1 ]; then
    echo "run_prefill: $gpus GPU(s): loopback, one process does the work of rank 0 of 4" >&2
    "$PYTHON" bench/bench_prefill.py --ep-loopback 4 "${headline[@]}" "${arguments[@]}" "$@"
else
    echo "run_prefill: no GPU: tiny checkpoint over 4 gloo ranks on the CPU" >&2
    if [ -z "$has_model" ]; then
        "$PYTHON" scripts/make_tiny_checkpoint.py "$out/tiny" >&2
        arguments+=(--model "$out/tiny")
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    torchrun bench/bench_prefill.py --device cpu --context-len 256 --prefill_batch_size 64 --page-size 16 \
        "${arguments[@]}" "$@"
fi
