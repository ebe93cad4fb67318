#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gets Vulkan headers with VK_ARM_tensors and VK_ARM_data_graph on Debian.
#
#   fetch_vulkan_headers.sh <folder>
#
# Afterwards <folder>/vulkan/vulkan.h is there; the folder is what -DVULKAN_HEADERS_DIR takes. Releases up to
# Debian 13 have older headers, so the package libvulkan-dev of Debian's unstable suite is downloaded from the
# mirror that this machine's apt uses, and unpacked. Nothing is installed; apt's own lists stay as they are.
set -euo pipefail

fail() {
  echo "fetch_vulkan_headers.sh: $*" >&2
  exit 1
}

[[ $# -eq 1 ]] || fail "usage: $0 <folder>"
target=$1
advice="unpack Khronos's Vulkan-Headers, version 1.4.363 or newer, into $target yourself"
if grep -qs "define VK_ARM_data_graph 1" "$target/vulkan/vulkan_core.h"; then
  exit 0
fi
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null ||
    fail "$tool is not there; $advice"
done

# The mirror of the sources that apt itself uses; `indextargets` has read every format of its files.
mirror=$(apt-get indextargets --format '$(REPO_URI)|$(ORIGIN)|$(LABEL)' 'Created-By: Packages' |
  awk -F'|' '$2 == "Debian" && $3 == "Debian" { print $1; exit }')
[[ -n "$mirror" ]] ||
  fail "apt knows no Debian mirror; run apt-get update, or $advice"
# Where this keyring is missing, apt falls back to the keys that it trusts for all sources.
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
{
  echo "Types: deb"
  echo "URIs: $mirror"
  echo "Suites: sid"
  echo "Components: main"
  [[ ! -f "$keyring" ]] || echo "Signed-By: $keyring"
} >"$work/sid.sources"
options=(-o "Dir::Etc::SourceList=$work/sid.sources" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)

apt-get "${options[@]}" -qq update || fail "apt-get update of Debian's unstable suite failed; see above"
(cd "$work" && apt-get "${options[@]}" -qq download libvulkan-dev) ||
  fail "libvulkan-dev could not be downloaded; see above"
dpkg-deb -x "$work"/libvulkan-dev_*.deb "$work/unpacked"
headers=$work/unpacked/usr/include
grep -q "define VK_ARM_data_graph 1" "$headers/vulkan/vulkan_core.h" ||
  fail "the package $(basename "$work"/libvulkan-dev_*.deb) has no VK_ARM_data_graph"
mkdir -p "$target"
for folder in vulkan vk_video; do
  rm -rf "${target:?}/$folder"
  cp -r "$headers/$folder" "$target/"
done
