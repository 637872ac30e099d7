# The example study in a container: docker build -t autotune . && docker run --rm --shm-size=1g autotune
# On GPUs, with the NVIDIA container toolkit: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128, then
# docker run --rm --gpus all --shm-size=8g -v "$PWD:/work" -w /work autotune autotune run model.py
FROM python:3.12-slim

# A compiler for the ops that DeepSpeed builds when they are first used, and make for the demo.
RUN apt-get update && apt-get install -y --no-install-recommends g++ make ninja-build && rm -rf /var/lib/apt/lists/*

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple "$TORCH"

# Dependencies first, so that a change of the code does not install them anew.
WORKDIR /opt/autotune
COPY pyproject.toml README.md LICENSE ./
COPY autotune/__init__.py autotune/
COPY search_spaces search_spaces
COPY objectives objectives
RUN pip install --no-cache-dir -e .
COPY . .

# Nobody's data is root's: trials run as an ordinary user, who owns the folder of the studies.
RUN useradd --create-home user && chown -R user /opt/autotune
USER user
CMD ["autotune", "run", "studies/code-gpt/study.yaml"]
