#!/bin/sh
# install_pytorch.sh PYTHON [PIP OPTION ...]
#
# Installs the PyTorch release that the tests run with into the environment of PYTHON, unless it has PyTorch: the CPU build
# of PyTorch's own index or, where options are given or that index cannot be reached, what pip finds. On Linux, pip's
# index has a build with CUDA, several GB. pyproject.toml allows newer releases; a range here would install the newest,
# which the torchvision of the tests does not fit.
set -u

python=$1
shift
release=2.13.0
"$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null && exit 0
install() { "$python" -m pip install --quiet --progress-bar off --disable-pip-version-check "torch==$release" "$@"; }
if [ $# -eq 0 ] && [ "$(uname -s)" = Linux ]; then
  install --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu 2>/dev/null && exit 0
  echo "PyTorch's index of CPU builds cannot be reached: taking what pip finds (PIP_ARGS may name an index)" >&2
fi
install "$@"
