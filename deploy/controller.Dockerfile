# The controller and the `shoal` command, without torch: docker build --file deploy/controller.Dockerfile .
ARG PYTHON=3.12.11-slim-bookworm

FROM python:${PYTHON} AS build
RUN python -m venv /venv
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY controller controller
COPY worker worker
COPY protos protos
RUN /venv/bin/pip install --no-cache-dir '.[controller,kubernetes]'

FROM python:${PYTHON}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini=0.19.0-1+b3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
RUN mkdir /data && chown 65532:65532 /data
# The installation compiles what is imported; who runs it may not write there.
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 SHOAL_DATA=/data
USER 65532:65532
WORKDIR /data
EXPOSE 7070 7071
ENTRYPOINT ["tini", "--"]
CMD ["shoal", "controller"]
