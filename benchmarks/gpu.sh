#!/bin/sh
# What autotune does on a GPU, in one call and without a network: nine minutes at most, each result written as it comes.
#
#   benchmarks/gpu.sh --pack             where there is a network: wheels of what a machine with torch may lack, into .wheels/
#   benchmarks/gpu.sh [--out DIR] ...    on the machine with the GPU; what else is given goes to gpu.py (--budget, --parts, --sizes)
#   benchmarks/gpu.sh --dry-run ...      the same code on a CPU and a tiny model; with --stand-in on what stands in for a GPU
#
# Afterwards, anywhere: python benchmarks/gpu_results.py DIR   writes benchmarks/results/gpu-CARD.json and studies/CARD-MODEL/.
set -eu
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
python=${PYTHON:-python3}
# What the machine is assumed to have: torch with CUDA, numpy, pandas, scipy, psutil, pyyaml, jinja2, rich, typer, threadpoolctl, and what they need.
packages="transformers accelerate tokenizers safetensors huggingface-hub hf-xet regex httpx2 httpcore2
apscheduler tzlocal h11 truststore anyio idna click shellingham deepspeed==0.19.8 hjson optuna>=5,<6 alembic mako colorlog sqlalchemy>=2 greenlet pydantic pydantic-core annotated-types
typing-inspection typing-extensions plotly>=6 einops msgpack ninja py-cpuinfo nvidia-ml-py tqdm"

if [ "${1:-}" = --pack ]; then
  target=${TARGET_PYTHON:-3.12} # the Python of the machine with the GPU
  rm -rf "$wheels" && mkdir -p "$wheels"
  # DeepSpeed and hjson come as sources, of pure Python as long as nothing is compiled ahead.
  DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" deepspeed==0.19.8 hjson
  set --
  for platform in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    set -- "$@" --platform "$platform"
  done
  pins=$("$python" -c "
from importlib import metadata
for name in '''$packages'''.split():
    plain = name.split('=')[0].split('<')[0].split('>')[0]
    if plain in ('deepspeed', 'hjson'): continue
    try: print(f'{plain}=={metadata.version(plain)}')
    except metadata.PackageNotFoundError: print(name)
")
  # shellcheck disable=SC2086
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$target" --implementation cp "$@" -d "$wheels" $pins
  size=$(du -sm "$wheels" | cut -f1)
  echo "$wheels: $(ls "$wheels" | wc -l) wheels for Python $target, $size MiB"
  [ "$size" -le 60 ] || { echo "more than 60 MiB: too much to carry along" >&2; exit 1; }
  exit 0
fi

out=${OUT:-.cache/gpu} dry= stand_in= previous=
for argument in "$@"; do
  shift
  [ "$previous" = --out ] && out=$argument
  [ "$argument" = --dry-run ] && dry=yes
  previous=$argument
  if [ "$argument" = --stand-in ]; then stand_in=yes; else set -- "$@" "$argument"; fi
done
[ -z "$stand_in" ] || [ -n "$dry" ] || { echo "gpu.sh: --stand-in goes with --dry-run" >&2; exit 2; }
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -d "$wheels" ]; then
  # Only what is missing, so that the machine's own torch and what was built for it stay; one call of pip for all.
  missing=$("$python" -c '
import re, sys
from importlib import metadata
have = "%d.%d" % sys.version_info[:2]
for wheel in sys.argv[1:]:
    try: metadata.version(wheel.rpartition("/")[2].split("-")[0])
    except metadata.PackageNotFoundError:
        for_python = re.search(r"-cp3(\d+)-cp", wheel)
        if for_python and "3." + for_python[1] != have:
            sys.exit(f"gpu.sh: {wheel} is not for this Python: pack with TARGET_PYTHON={have} benchmarks/gpu.sh --pack")
        print(wheel)
' "$wheels"/*.whl)
  # shellcheck disable=SC2086
  [ -z "$missing" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" $missing
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ -n "$stand_in" ]; then
  export PYTHONPATH="$PWD/tests/support/stand_in:$PYTHONPATH" DS_ACCELERATOR=cuda CUDA_HOME=/nowhere
  [ -n "${STAND_IN:-}" ] || export STAND_IN='{"n": 1}'
elif [ -n "$dry" ]; then
  export DS_ACCELERATOR=cpu
fi
# Whatever hangs, the call ends within nine minutes; the results are on the disk by then. A dry run leaves nothing out.
[ -n "$dry" ] && limit=900 || limit=520
timeout --signal=INT --kill-after=15 "${HARD_LIMIT_S:-$limit}" "$python" benchmarks/gpu.py --out "$out" "$@" 2>&1 | tee "$out/log.txt"
if [ -n "$dry" ]; then
  "$python" benchmarks/gpu_results.py "$out" --into "$out/analysed"
fi
[ -s "$out/results.jsonl" ]
