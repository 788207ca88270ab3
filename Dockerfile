# docker build -t bnncli .                                      PyTorch with CUDA
# docker build -t bnncli --build-arg TORCH_INDEX=URL .          PyTorch's CPU build; URL is the index that pytorch.org gives for CPU
# docker build -t bnncli --build-arg BASE=IMAGE .               a base image that already has Python and PyTorch, such as pytorch/pytorch
# docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/data" bnncli status ckpt.pt
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=
ARG EXTRAS=
# make runs the steps of `bnncli grid`.
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" torch; fi
COPY . /src
RUN pip install --no-cache-dir "/src${EXTRAS:+[$EXTRAS]}" && rm -rf /src
# A user without a home directory gets its caches of figures and compiled kernels here.
ENV HOME=/tmp
WORKDIR /data
ENTRYPOINT ["bnncli"]
