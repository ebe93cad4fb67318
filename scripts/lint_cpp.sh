#!/bin/sh
# Formatting and static analysis of the C++ in runtime/: scripts/lint_cpp.sh BIN [vgf]
# BIN is the folder with python, clang-format and clang-tidy. clang-tidy leaves out VgfBackend, whose Vulkan headers come
# from Debian's mirror, unless `vgf` asks for it; and two files of the firmware that contain assembly of an Arm CPU.
# clang-tidy takes half a minute of processor time. It does not run again on sources, checks and tools that it has passed.
set -eu
bin=$1
cd "$(dirname "$0")/.."

find runtime -name '*.cpp' -o -name '*.h' -o -name '*.hpp' | xargs "$bin/clang-format" --dry-run --Werror

library=$("$bin/python" -c "import importlib.util as u; print(u.find_spec('executorch').submodule_search_locations[0])")
flags="-std=c++17 -Iruntime -isystem runtime/emulator/driver -isystem runtime/tests/ethosu_linux/fake_driver/include"
flags="$flags -Iruntime/tests/ethosu_linux/fake_driver -DET_EVENT_TRACER_ENABLED -DC10_USING_CUSTOM_GENERATED_MACROS"
flags="$flags -isystem $library/include -isystem $library/include/executorch/runtime/core/portable_type/c10"
if [ "${2:-}" = vgf ]; then
  runtime/cmake/fetch_vulkan_headers.sh build/vulkan-headers
  vgf=$("$bin/python" -c "import importlib.util as u; print(u.find_spec('vgf_lib').submodule_search_locations[0])")
  # lsan_interface.h is among the headers of the compiler.
  flags="$flags -isystem build/vulkan-headers -isystem $vgf/binaries/include -idirafter $(g++ -print-file-name=include)"
  left_out='runtime/tests/firmware/startup.cpp\|runtime/tests/firmware/saved/main.cpp'
else
  left_out='runtime/tests/firmware/startup.cpp\|runtime/tests/firmware/saved/main.cpp\|runtime/backends/vgf/.*\|runtime/tests/vgf/.*'
fi
# The digest covers what clang-tidy reads; the version of ExecuTorch stands for its headers.
passed=build/lint_cpp.$(
  {
    find runtime -type f -exec sha256sum {} + | sort
    cat .clang-tidy "$0"
    echo "$flags" "$left_out"
    "$bin/python" -c "from importlib.metadata import version; print(version('executorch'))"
    "$bin/clang-tidy" --version
    g++ --version
  } | sha256sum | cut -c1-32
)
[ "${2:-}" = vgf ] || [ ! -e "$passed" ] || exit 0
# shellcheck disable=SC2086 # the flags are words
find runtime -name '*.cpp' ! -regex "$left_out" -print0 |
  xargs -0 -P "$(nproc)" -I{} "$bin/clang-tidy" --quiet {} -- $flags
mkdir -p build
rm -f build/lint_cpp.*
touch "$passed"
