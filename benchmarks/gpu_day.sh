#!/usr/bin/env bash
# What only GPUs can show, on one node without network:   benchmarks/gpu_day.sh [--toy] [OUT]
# Run it from the repository's root with the environment active. Each part has eight minutes and leaves OUT/PART.log;
# OUT/summary.txt says what became of it. Started again, it does the parts that are not done. With --toy each kind of
# part runs on CPU at a tiny size. Ends with 1 where a part failed; a part that this node cannot do is left out, and
# said so.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

toy=
[ "${1-}" = --toy ] && toy=yes && shift
out=$(realpath -m "${1:-gpu-day}")
part_s=480
mkdir -p "$out"
num_gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c .)
[ -n "$toy" ] && echo "toy: tiny models on CPU" || echo "GPUs: $num_gpus"
failed=0

say() { echo "$*" | tee -a "$out/summary.txt"; }

# part NAME COMMAND...: run a part that is not done yet
part() {
    local name=$1 began=$SECONDS code
    shift
    if [ -e "$out/$name.done" ]; then
        echo "$name: done before"
        return
    fi
    timeout --kill-after=20 "$part_s" "$@" >"$out/$name.log" 2>&1
    code=$?
    case $code in
        0) touch "$out/$name.done"; say "$name: $((SECONDS - began)) s" ;;
        124 | 137) failed=1; say "$name: stopped after $part_s s, see $out/$name.log" ;;
        *) failed=1; say "$name: failed with $code: $(tail -n 1 "$out/$name.log")" ;;
    esac
}

# with_gpus N PART...: the part, or why it is left out
with_gpus() {
    local needed=$1
    shift
    if [ -n "$toy" ] || [ "$num_gpus" -ge "$needed" ]; then
        part "$@"
    else
        say "$1: left out: it needs $needed GPUs, and $num_gpus are here"
    fi
}

# train NAME KEY=VALUE...: a whole run of four steps, with its report in OUT and its times in the summary
train() {
    local name=$1
    shift
    hpc-grpo train local/debug run.name="$name" run.root="$out/runs" model.path="$out/model" model.dtype="$dtype" \
        data.train.path="$out/train.jsonl" data.eval.path="$out/eval.jsonl" "${device[@]}" \
        'rewards=[{name: regex, args: {pattern: "[aeiou]"}}]' eval.reward=regex "$@" &&
        hpc-grpo report "$out/runs/$name" && say "$name: $(python -c 'import json, sys
first, *steps = [json.loads(line) for line in open(sys.argv[1])]
last = steps[-1]
print("actors up after {:.1f} s; the last step: sampled {:.2f} s, trained {:.2f} s, published {:.3f} s; engine and "
      "learner differ by {:.1e} nats".format(first["time/start_s"], last["time/generate_wait_s"], last["time/train_s"],
                                           last["time/publish_s"], last["mismatch/kl"]))' \
            "$out/runs/$name/metrics.jsonl")"
}
export -f train say
export out

if [ -n "$toy" ]; then
    export dtype=float32
    device=(model.device=cpu)
    sizes=(--hidden-size 64 --layers 2 --heads 2)
    learner=(--toy --budget-s 25)
    publish=(--quick --rounds 1)
else
    export dtype=bfloat16
    device=(model.device=cuda)
    sizes=(--hidden-size 1024 --layers 12 --heads 16)
    learner=(--budget-s 440)
    publish=()
fi
# bash hands no arrays to a child: each part is a bash of its own, which timeout can end.
in_bash() { printf 'device=(%s); "$@"' "${device[*]@Q}"; }
run() { with_gpus "$1" "$2" bash -c "$(in_bash)" bash train "${@:2}"; }

part install python -c 'import sys, torch, vllm, deepspeed, ray
print("torch", torch.__version__, "CUDA", torch.version.cuda, "vllm", vllm.__version__, "deepspeed",
      deepspeed.__version__, "ray", ray.__version__)
sys.exit("this torch is built for CPUs" if sys.argv[1] == "cuda" and not torch.version.cuda else None)' \
    "${device[0]#*=}"
part model python -m hpc_grpo.demo.make "$out" "${sizes[@]}"
part doctor hpc-grpo cluster doctor --json
with_gpus 1 learner python benchmarks/gpu_learner.py "${learner[@]}" --out "$out/learner"
part publish python benchmarks/weight_publish.py "${publish[@]}"
run 2 run-1-1-cold engine.engines_per_node=1
[ -n "$toy" ] || run 2 run-1-1-warm engine.engines_per_node=1
run 1 run-colocated engine.engines_per_node=1 placement.colocate=true engine.vllm.gpu_memory_utilization=0.5
[ -n "$toy" ] || run 2 run-1-1-sync engine.engines_per_node=1 engine.vllm.async_scheduling=false
run 3 run-1-tp2 engine.engines_per_node=1 engine.tensor_parallel=2
[ -n "$toy" ] || run 3 run-shared-rows engine.engines_per_node=1 placement.learners_per_node=2 train.sequence_parallel=2
[ -n "$toy" ] || run 4 run-1-3 engine.engines_per_node=3
echo "Everything is in $out; summary.txt has a line for each part."
exit "$failed"
