# Twofold on a CPU: docker build -f docker/cpu.Dockerfile -t twofold:cpu .
# TORCH may name another version or a wheel's address; a CPU build keeps the image small.
FROM python:3.12-slim
ARG TORCH=torch==2.13.0

# The CPU kernels are compiled on first use for the machine they run on.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir "${TORCH}"
COPY . /opt/twofold
RUN pip install --no-cache-dir /opt/twofold && rm -rf /opt/twofold

ENV TWOFOLD_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["twofold"]
CMD ["serve", "smollm2-135m-instruct", "--quantize", "rtn:4:32", "--host", "0.0.0.0", "--port", "8000"]
