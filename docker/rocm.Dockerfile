# Twofold on AMD GPUs: docker build -f docker/rocm.Dockerfile -t twofold:rocm .
# The base has torch's ROCm build and its Triton; Twofold itself adds nothing vendor-specific.
ARG BASE=rocm/pytorch:latest
FROM ${BASE}

COPY . /opt/twofold
RUN python3 -m pip install --no-cache-dir /opt/twofold && rm -rf /opt/twofold

ENV TWOFOLD_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["twofold"]
CMD ["serve", "smollm2-135m-instruct", "--host", "0.0.0.0", "--port", "8000"]
