# Two images from one file:
#     docker build --target scheduler -t octavo-scheduler .      no torch, no CUDA
#     docker build --target worker    -t octavo-worker .
# The worker computes on the CPU; --build-arg TORCH_INDEX_URL= takes the package index's own torch, on Linux a CUDA build,
# to which --build-arg APT_PACKAGES="gcc libc6-dev" belongs: Triton compiles what launches its kernels.
# --build-arg PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name other places to find packages in (a page of wheels). They stay
# readable in the image's history: no credentials in them.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# A fixed number, so that a cluster can check that the image does not run as root.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin octavo
WORKDIR /src
# Dependencies come before the code, so that a change of code builds in seconds.
COPY pyproject.toml constraints.txt LICENSE ./

FROM base AS scheduler
ARG PIP_FIND_LINKS=
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --constraint constraints.txt ".[scheduler]"
COPY octavo octavo
COPY protos protos
COPY scheduler_svc scheduler_svc
RUN pip install --no-deps --force-reinstall . && rm -rf build
WORKDIR /home/octavo
USER 10001
ENV OCTAVO_HOST=0.0.0.0
EXPOSE 50051
# Liveness: whoever acts on it restarts the container, which would help no scheduler that waits for a worker.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s CMD ["octavo", "health", "127.0.0.1:50051", "--service", ""]
ENTRYPOINT ["octavo", "scheduler"]

FROM base AS worker
ARG PIP_FIND_LINKS=
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG APT_PACKAGES=
RUN if [ -n "$APT_PACKAGES" ]; then apt-get update && apt-get install --yes --no-install-recommends $APT_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
# Beside the other index: of the pinned version pip prefers the one with a local part, 2.13.0+cpu.
RUN PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL $TORCH_INDEX_URL" pip install --constraint constraints.txt ".[worker]"
COPY octavo octavo
COPY protos protos
COPY kernels kernels
COPY worker_svc worker_svc
RUN pip install --no-deps --force-reinstall . && rm -rf build
# Models and compiled kernels, on a volume that takes this folder's owner when it is new.
RUN install --directory --owner=octavo /cache
WORKDIR /home/octavo
USER 10001
# GOMP_SPINCOUNT: workers that share cores must not spin long at barriers (measured in octavo/serving_plan.py).
ENV OCTAVO_HOST=0.0.0.0 OCTAVO_CACHE=/cache NUMBA_CACHE_DIR=/cache/kernels GOMP_SPINCOUNT=1000 \
    TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 50061
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["octavo", "health", "127.0.0.1:50061", "--service", ""]
ENTRYPOINT ["octavo", "worker"]
