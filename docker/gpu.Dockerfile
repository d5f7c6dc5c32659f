# hpc-grpo on NVIDIA's GPUs. From the repository's root:
#   docker build -f docker/gpu.Dockerfile -t hpc-grpo:gpu .
# The driver is the node's; CUDA's compiler is for what Triton, vLLM and torch compile at run time. Choose a base whose
# CUDA has the major version that torch is built for: `hpc-grpo cluster doctor` compares it with the driver's.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL=""
# tzdata, which Python's packages bring along, would else ask for a time zone.
ARG DEBIAN_FRONTEND=noninteractive
# librdmacm and ibverbs: NCCL over InfiniBand, whose devices a run hands in.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
       g++ git ibverbs-providers libibverbs1 libnuma1 librdmacm1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hpc-grpo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/setup.sh tools/setup.sh
COPY hpc_grpo hpc_grpo
RUN tools/setup.sh gpu
COPY configs configs
ENV PATH=/opt/hpc-grpo/.venv/bin:${PATH}
