# walkaway with all that a run, a gate and a page need, but for torch:
#   docker build -t walkaway . && docker run --rm --network host walkaway conform --target http://127.0.0.1:8000
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY harness harness
COPY reference_engine reference_engine
COPY workloads workloads
COPY dashboards dashboards
RUN pip install --no-cache-dir '.[load]' --constraint constraints.txt && rm -r /src
WORKDIR /runs
ENTRYPOINT ["walkaway"]
