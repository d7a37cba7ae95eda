# The exporter on Debian's own Python. No compiler, no pip and no package index in the final stage.
# Build: tools/build-image.sh, or `docker build --tag fgpu-exporter:0.1.0 .`
ARG BASE=docker.io/library/debian:13.8-slim

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "errexit", "-o", "pipefail", "-c"]
# No versions of packages: the base's tag pins Debian's release, and its security updates are wanted.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Every dependency by version and hash, as wheels only: nothing of theirs is run while they are installed.
COPY deploy/image-requirements.txt ./
RUN python3 -m venv --without-pip /opt/fgpu-exporter \
 && python3 -m pip --python /opt/fgpu-exporter/bin/python install --no-cache-dir --no-compile --no-deps --require-hashes \
      --only-binary :all: --requirement image-requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
# Of the kubernetes package configuration, credentials and connections are used: neither its asyncio half nor its models, which are 100 MB.
# A root file system that is read-only takes no byte code later, so what the program loads is compiled now, by loading it.
RUN python3 -m pip --python /opt/fgpu-exporter/bin/python install --no-cache-dir --no-deps . \
 && rm -rf /opt/fgpu-exporter/lib/python3.*/site-packages/kubernetes/aio \
 && find /opt/fgpu-exporter/lib/python3.*/site-packages/kubernetes/client/api \
      /opt/fgpu-exporter/lib/python3.*/site-packages/kubernetes/client/models -type f ! -name __init__.py -delete \
 && /opt/fgpu-exporter/bin/python -c 'import exporter.__main__, exporter.simulated, kubernetes.client as k, kubernetes.config; k.ApiClient; import exporter.commands as c; [c.import_module(m) for m in c.COMMANDS.values()]' \
 && /opt/fgpu-exporter/bin/python -m exporter --demo --once >/dev/null

FROM ${BASE}
LABEL org.opencontainers.image.title="fgpu-exporter" \
      org.opencontainers.image.description="Which pod uses how much of a shared GPU, how much it was given, and whether it takes more." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/ldconfig /var/log/* /usr/share/doc /usr/share/man
COPY --from=build /opt/fgpu-exporter /opt/fgpu-exporter
ENV PATH=/opt/fgpu-exporter/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    MALLOC_ARENA_MAX=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# The kubelet's pod-resources folder is open to uid 0 alone; the manifest takes every capability from it.
# hadolint ignore=DL3002
USER 0:0
EXPOSE 9844
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/fgpu-exporter/bin/python", "-m", "exporter"]
