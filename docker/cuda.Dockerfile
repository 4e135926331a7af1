# Twofold on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t twofold:cuda .
ARG BASE=pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime
FROM ${BASE}

# Triton compiles its launchers with the system's C compiler at run time.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

COPY . /opt/twofold
RUN pip install --no-cache-dir /opt/twofold && rm -rf /opt/twofold

ENV TWOFOLD_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["twofold"]
CMD ["serve", "smollm2-135m-instruct", "--host", "0.0.0.0", "--port", "8000"]
