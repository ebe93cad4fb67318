#!/bin/sh
# Installs the CPU build of PyTorch into the environment of the Python named on the command line, unless it has one.
# On Linux, pip's own index has a build with CUDA, several GB. Where PyTorch's index cannot be reached, pip installs what
# it finds with the rest.
set -u

python=$1
"$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null && exit 0
[ "$(uname -s)" = Linux ] || exit 0
wanted=$("$python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*(x for x in tomllib.load(file)["project"]["dependencies"] if x.startswith("torch>")))')
"$python" -m pip install --quiet --progress-bar off --disable-pip-version-check --retries 0 --timeout 15 \
  --index-url https://download.pytorch.org/whl/cpu "$wanted" 2>/dev/null ||
  echo "PyTorch's index of CPU builds cannot be reached: taking what pip finds (PIP_ARGS may name an index)" >&2
