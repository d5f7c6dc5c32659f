# hpc-grpo on CPUs. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t hpc-grpo:cpu .
# Where pip's index has no CPU builds of PyTorch: --build-arg PIP_EXTRA_INDEX_URL=URL of PyTorch's CPU wheel index.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=""
# g++ compiles vLLM's and torch's kernels at run time; libnuma1 binds processes to cores.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hpc-grpo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/setup.sh tools/setup.sh
COPY hpc_grpo hpc_grpo
RUN tools/setup.sh cpu
COPY configs configs
ENV PATH=/opt/hpc-grpo/.venv/bin:${PATH}
