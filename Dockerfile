# Three images from one file:
#     docker build --target scheduler -t octavo-scheduler .      no torch, no CUDA
#     docker build --target gateway   -t octavo-gateway .        OpenAI's API over HTTP, before a scheduler
#     docker build --target worker    -t octavo-worker .
# The worker computes on the CPU. For a GPU: --build-arg LOCK=worker-cuda --build-arg TORCH_INDEX_URL= takes the package
# index's own torch, on Linux a CUDA build, and --build-arg APT_PACKAGES="gcc libc6-dev" the compiler that Triton needs.
# --build-arg PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name other places for packages. They stay readable in the image's
# history, so no credentials in them. Packages must have the hashes of deploy/locks, wherever they come from; `make locks`
# renews these. /usr/share/doc/octavo/sbom.cdx.json names them; --build-arg REVISION=COMMIT is a label.
# The base image is named by its digest, here and nowhere else, because tags move;
# `docker buildx imagetools inspect python:3.11-slim` shows the digest of today.
ARG BASE_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# A fixed user id, so that a cluster can check that the image does not run as root.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin octavo
WORKDIR /src
# Dependencies are installed before the code is copied, so that a change of code builds in seconds.
COPY deploy/locks deploy/locks

FROM base AS scheduler
ARG PIP_FIND_LINKS=
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --require-hashes --requirement deploy/locks/scheduler.txt
COPY pyproject.toml LICENSE ./
COPY octavo octavo
COPY protos protos
COPY scheduler_svc scheduler_svc
COPY deploy/sboms deploy/sboms
RUN pip install --no-deps --no-build-isolation . && rm -rf build \
    && install -D --mode=644 "deploy/sboms/scheduler.cdx.json" /usr/share/doc/octavo/sbom.cdx.json
WORKDIR /home/octavo
ARG REVISION=
LABEL org.opencontainers.image.title="octavo-scheduler" \
    org.opencontainers.image.description="Holds every request and decides what workers compute" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="$REVISION" \
    sbom="/usr/share/doc/octavo/sbom.cdx.json"
USER 10001
ENV OCTAVO_HOST=0.0.0.0
EXPOSE 50051
# Liveness, not readiness: restarting a scheduler that waits for a worker would not help.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s CMD ["octavo", "health", "127.0.0.1:50051", "--service", ""]
ENTRYPOINT ["octavo", "scheduler"]

FROM base AS gateway
ARG PIP_FIND_LINKS=
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --require-hashes --requirement deploy/locks/gateway.txt
COPY pyproject.toml LICENSE ./
COPY octavo octavo
COPY protos protos
COPY gateway_svc gateway_svc
COPY deploy/sboms deploy/sboms
RUN pip install --no-deps --no-build-isolation . && rm -rf build \
    && install -D --mode=644 "deploy/sboms/gateway.cdx.json" /usr/share/doc/octavo/sbom.cdx.json
WORKDIR /home/octavo
ARG REVISION=
LABEL org.opencontainers.image.title="octavo-gateway" \
    org.opencontainers.image.description="OpenAI's API over HTTP, before a scheduler" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="$REVISION" \
    sbom="/usr/share/doc/octavo/sbom.cdx.json"
USER 10001
ENV OCTAVO_HOST=0.0.0.0 OCTAVO_METRICS_HOST=0.0.0.0
EXPOSE 8000
# Liveness, as with the scheduler.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s CMD ["octavo", "health", "http://127.0.0.1:8000", "--service", ""]
ENTRYPOINT ["octavo", "gateway"]

# The CPU kernels for every x86-64; the compiler stays here.
FROM base AS native
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY kernels/cpu/native kernels/cpu/native
RUN python kernels/cpu/native/build.py --all

FROM base AS worker
ARG PIP_FIND_LINKS=
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG LOCK=worker
ARG APT_PACKAGES=
RUN if [ -n "$APT_PACKAGES" ]; then apt-get update && apt-get install --yes --no-install-recommends $APT_PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
# Beside the other index, which has everything else.
RUN PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL $TORCH_INDEX_URL" \
    pip install --require-hashes --requirement "deploy/locks/$LOCK.txt"
COPY pyproject.toml LICENSE ./
COPY octavo octavo
COPY protos protos
COPY kernels kernels
COPY --from=native /src/kernels/cpu/native/built kernels/cpu/native/built
COPY worker_svc worker_svc
COPY deploy/sboms deploy/sboms
RUN pip install --no-deps --no-build-isolation . && rm -rf build \
    && install -D --mode=644 "deploy/sboms/$LOCK.cdx.json" /usr/share/doc/octavo/sbom.cdx.json
# Models; a new volume takes this folder's owner.
RUN install --directory --owner=octavo /cache
WORKDIR /home/octavo
ARG REVISION=
LABEL org.opencontainers.image.title="octavo-worker" \
    org.opencontainers.image.description="Weights, cache and kernels: computes what a scheduler decides" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="$REVISION" \
    sbom="/usr/share/doc/octavo/sbom.cdx.json"
USER 10001
# GOMP_SPINCOUNT: workers that share cores must not spin long at barriers (measured in octavo/serving/plan.py).
ENV OCTAVO_HOST=0.0.0.0 OCTAVO_CACHE=/cache HF_HOME=/cache/huggingface GOMP_SPINCOUNT=1000 TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 50061
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["octavo", "health", "127.0.0.1:50061", "--service", ""]
ENTRYPOINT ["octavo", "worker"]
