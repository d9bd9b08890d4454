# A worker: docker build --file deploy/worker.Dockerfile . Add your script and what it imports in an image FROM this one.
# Which build of torch this is (CPU, CUDA) is up to the index: --build-arg TORCH_INDEX=https://…
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=
RUN python -m venv /venv
RUN /venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==${TORCH}"
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY controller controller
COPY worker worker
COPY protos protos
RUN /venv/bin/pip install --no-cache-dir '.[worker,gpu,s3]' "torch==${TORCH}"

FROM python:${PYTHON}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.0-1+b3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
RUN mkdir /data && chown 65532:65532 /data
# The installation compiles what is imported; who runs it may not write there.
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /data
# Hands SIGTERM on, which Python as process 1 would not get, and collects what a script's children leave.
ENTRYPOINT ["tini", "-g", "--"]
CMD ["python", "-m", "shoal.demo.byte_gpt"]
